"""The faults of a run: of the network, of the control plane, of the engines' processes, and of the clocks."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from meridian_control.engine.freeze_state import Freeze, Match

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from tests.sim.world import World


def policy(world: World, rng: random.Random) -> None:
    """Put one or several new revisions in force."""
    for _ in range(rng.choice((1, 1, 1, 4))):
        world.put_policy(rng)


def freeze(world: World, rng: random.Random) -> None:
    """Freeze engines for a while, or thaw them early."""
    until = world.timeline.utc_now() + timedelta(seconds=rng.choice((0.05, 0.5, 20.0)))
    match = rng.choice((Match(), Match(engine_ids=("engine-0",))))
    frozen = Freeze(1, match, "simulator", "", world.timeline.utc_now(), until)
    world.server.set_freezes((frozen,) if rng.random() < 0.7 else ())


def cut(world: World, rng: random.Random) -> None:
    """Break a stream; one side may know long before the other."""
    for stream in world.server.streams:
        if rng.random() < 0.7:
            stream.break_off(rng.choice((None, 0.0, 0.3)), rng.choice((None, 0.0, 0.3, 10.0)))


def half_open(world: World, rng: random.Random) -> None:
    """Let no message through any more; both sides find out by themselves."""
    for stream in world.server.streams:
        if rng.random() < 0.7:
            stream.dead = True
            stream.break_off(rng.choice((None, 1.0)), rng.choice((None, 1.0)))


def control_restart(world: World, rng: random.Random) -> None:
    """Kill the control plane, and start it again at once or later."""
    world.server.kill(tells_agents=rng.random() < 0.7)
    world.timeline.call_later(rng.choice((0.0, 0.1, 2.0)), world.start_control)


def control_hangs(world: World, rng: random.Random) -> None:
    """Let the control plane read and write nothing for a while."""
    world.server.hung_until_s = world.timeline.now_s + rng.choice((0.05, 0.5, 5.0))


def control_drains(world: World, _: random.Random) -> None:
    """Let the control plane announce that it goes away."""
    if world.server.fleet is not None:
        world.server.fleet.going_away("the simulator says so")


def slow_network(world: World, rng: random.Random) -> None:
    """Change the latency."""
    world.network.latency_ms = rng.choice((0.0, 1.0, 10.0, 100.0, 1000.0))


def link_stalls(world: World, rng: random.Random) -> None:
    """Stall the link, often long enough to fill its ring, or only its sending while messages to the agent arrive.

    Sometimes the stream ends before the link goes on.
    """
    for link in world.network.links:
        until_s = world.timeline.now_s + rng.choice((0.02, 0.2, 1.0, world.step_ms / 25, world.step_ms / 50))
        if rng.random() < 0.5:
            link.mute_until_s = until_s
        else:
            link.stalled_until_s = until_s
        if rng.random() < 0.2 and link.stream is not None:
            link.stream.break_off(0.0, rng.choice((None, 1.0)))


def time_passes(world: World, rng: random.Random) -> None:
    """Let time pass in which nothing runs, perhaps longer than a lease.

    In other cases only the engines stand still: messages to them arrive, and the control plane is gone before they
    go on.
    """
    seconds = rng.choice((0.05, 0.3, 5.0, 40.0))
    if rng.random() < 0.3:
        for _ in range(10):
            world.timeline.advance(world.network.latency_ms / 1e3)
            world.network.tick()
        world.server.kill(tells_agents=True)
        world.timeline.advance(1.0)
        world.network.tick()
        world.timeline.call_later(seconds, world.start_control)
    world.timeline.advance(seconds)


def wall_clock_jumps(world: World, rng: random.Random) -> None:
    """Set the wall clock back or ahead."""
    world.timeline.jump_s += rng.choice((-3600.0, -1.0, 1.0, 3600.0))


def engine_restarts(world: World, rng: random.Random) -> None:
    """Kill one engine's process and start it again."""
    if not world.is_quiet:
        rng.choice(world.plants).restart()


# All faults by the name under which a run notes them.
FAULTS: dict[str, Callable[[World, random.Random], None]] = {
    f"fault_{fault.__name__}": fault
    for fault in (
        policy,
        freeze,
        cut,
        half_open,
        control_restart,
        control_hangs,
        control_drains,
        slow_network,
        link_stalls,
        time_passes,
        wall_clock_jumps,
        engine_restarts,
    )
}
