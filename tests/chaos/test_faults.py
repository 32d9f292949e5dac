"""Faults of the control plane and of the network on a real engine that goes on serving.

One engine has every fault in turn. A cap governs it as a decision, which `scheduler.lease_ms` ends soon after the
stream. So the tokens of each request show what governed it: capped tokens mean that a decision was applied, and tokens
equal to stock's mean that none was.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.chaos.driver import LOAD, Engine
from tests.chaos.network import NoNamespacesError
from tests.chaos.reports import Done, Report
from tests.chaos.scene import FAULTS, TARGET, Fault, Scene
from tests.needed import NETWORK
from tests.processes import wait_for

LEASE_S, CAP = 0.5, 12
# Most tokens of a request: a cap shows in the first ones after it.
TOKENS = 24
CAPPED: dict[str, Any] = {
    "scheduler": {"max_think_tokens": CAP, "lease_ms": int(LEASE_S * 1000)},
    "fallback": {"lease_ms": int(LEASE_S * 2000)},
    "entropy": {"shadow": True},
}
# Number of requests awaited during a fault; for a fault that ends leases, only requests that began after the leases'
# end count.
DURING = 6
# Seconds between two steps, because the engine shares its core with other tests.
PAUSE_S = 0.015
# A fault that does not end the leases lasts this long.
LASTS_S = 1.5
# Limit against hanging. A fault lasts until requests were served under it, so a step that waited for the fault's end
# would wait for ever. `tests/engine/test_never_waits.py` shows without a clock that no step waits at all.
STANDSTILL_S = 30.0
# gRPC by itself may hold a fork up for a second; this is the allowed part of it.
HELD_UP_S = 0.5
# Allowed growth of a process that has already been warm.
GROWTH_MB = 30.0

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


@dataclass
class World:
    """The engine, its control plane and network, and each case's tokens: those of stock, and those under the cap."""

    scene: Scene
    engine: Engine
    stock: list[tuple[int, ...]]
    capped: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Return the token that ends thinking."""
        case = next(case for case, tokens in self.capped.items() if tokens != self.stock[case])
        return self.capped[case][_common(self.capped[case], self.stock[case])]

    def explained(self, done: Done) -> bool:
        """Return whether a request's tokens are stock's, or stock's up to the token at which a cap ended its
        thinking."""
        stock = self.stock[done.case]
        common = _common(done.tokens, stock)
        return done.tokens == stock or (common >= CAP and done.tokens[common] == self.end)

    def collect(self, enough: Callable[[list[Report]], Any], timeout_s: float, what: str) -> list[Report]:
        """Collect reports until there are enough, while the engine runs. Every report must show a healthy engine."""
        reports: list[Report] = []

        def more() -> Any:
            reports.append(self.engine.run())
            return enough(reports)

        wait_for(more, timeout_s, what)
        healthy(reports)
        return reports

    def governed(self) -> list[Report]:
        """Wait until decisions are applied again: each case of the requests that begin from now on was capped."""
        assert len(self.capped) == len(self.stock), "test_absent_at_start has not found the capped tokens"
        since_s = time.monotonic()

        def capped(reports: list[Report]) -> bool:
            said = {done.case: done.tokens for done in finished(reports) if done.began_s > since_s}
            return said == self.capped

        return self.collect(capped, 40, "decisions to be applied")


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def finished(reports: list[Report]) -> list[Done]:
    return [done for report in reports for done in report.finished]


def healthy(reports: list[Report]) -> None:
    """Assert that no request failed, the engine never stood still, no queue was too long, and the agent is on."""
    assert {done.reason for done in finished(reports)} <= {"stop", "length"}
    assert max(report.longest_s for report in reports) < STANDSTILL_S
    assert not any(report.fault for report in reports)
    assert max(report.ring for report in reports) <= 4098
    assert max(report.inbox for report in reports) <= 4097


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, stock: list[list[int]]) -> Iterator[World]:
    """Yield an engine that serves, and a control plane that is not started yet."""
    folder = tmp_path_factory.mktemp("chaos")
    try:
        scene = Scene(folder, seed=5)
    except NoNamespacesError as error:
        pytest.skip(f"{error}; {NETWORK.reason}")
    within, forks = scene.network.within("engine"), {"GRPC_ENABLE_FORK_SUPPORT": "1"}
    load = {**LOAD, "pause_s": PAUSE_S, "max_tokens": TOKENS}
    engine = Engine(folder, "chaos", TARGET, within, load=load, environment=forks)
    try:
        engine.ready()
        engine.run()
        yield World(scene, engine, [tuple(tokens[:TOKENS]) for tokens in stock])
    finally:
        engine.stop()
        scene.stop()


def test_absent_at_start(world: World) -> None:
    """The engine is stock vLLM until there is a control plane, and governed from then on."""
    reports = world.collect(lambda r: len(finished(r)) >= 2 * DURING, 60, "requests without a control plane")
    assert all(done.tokens == world.stock[done.case] for done in finished(reports))
    world.scene.control.start()
    world.scene.control.apply(CAPPED)
    since_s = time.monotonic()

    def differing(reports: list[Report]) -> dict[int, set[tuple[int, ...]]]:
        """Return each case's tokens since then that differ from stock's; on a busy machine a cap's lease may end."""
        said: dict[int, set[tuple[int, ...]]] = {case: set() for case in range(len(world.stock))}
        for done in finished(reports):
            if done.began_s > since_s:
                said[done.case].add(done.tokens)
        return {case: tokens - {world.stock[case]} for case, tokens in said.items()}

    def enough(reports: list[Report]) -> bool:
        return len(finished(reports)) >= 48 and sum(map(bool, differing(reports).values())) >= 4

    reports = world.collect(enough, 60, "capped requests")
    for case, tokens in differing(reports).items():
        # After the end of a lease a cap may come late; the cap that was there in time ended thinking first.
        stock = world.stock[case]
        world.capped[case] = min(tokens, key=functools.partial(_common, stock), default=stock)
    assert set(world.capped) == set(range(len(world.stock)))
    assert all(world.explained(done) for done in finished(reports))
    world.governed()


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault(world: World, fault: Fault) -> None:
    before, log, network = world.engine.run(), world.engine.log(), world.scene.network
    packets = network.counts()
    # On a busy machine the agent may have lost its stream before the fault; it does not say so again.
    said = log.rfind("meridian: READY")
    began_s = time.monotonic()
    fault.begin(world.scene)

    def over(reports: list[Report]) -> bool:
        return shown(fault, reports, began_s) and met(fault, packets, network.counts())

    reports = world.collect(over, 120, "the fault to have its effect")
    ended_s = time.monotonic()
    fault.end(world.scene)
    reports += world.governed()
    assert all(world.explained(done) for done in finished(reports))
    if fault.loses:
        alone = [done for done in ungoverned(reports, began_s) if done.ended_s < ended_s]
        assert [done.tokens for done in alone] == [world.stock[done.case] for done in alone]
    logged = world.engine.log()[said:]
    assert [line for line in fault.says if line not in logged] == []
    assert reports[-1].rss_mb - before.rss_mb < GROWTH_MB
    wait_for(lambda: shown_well(world), 20, "the control plane to show the engine")
    assert world.scene.control.metrics()["meridian_unknown_outcomes_total"] == 0


def test_forks_with_grpcs_fork_support(world: World) -> None:
    """gRPC's fork support does not hold forks up, the child ends, and the stream goes on.

    gRPC stops its threads before each fork; by itself it takes a second for that in two forks of three.
    """
    world.governed()
    said = len(world.engine.log())
    held_up = [held_up_s(world) for _ in range(12)]
    # The duration of the fork itself depends on the machine, so some forks may exceed the limit.
    assert sorted(held_up)[-5] < HELD_UP_S, held_up
    ended = [line for line in world.engine.log()[said:].splitlines() if " ended: " in line]
    # The leases are short, so a long pause of the machine may end the stream for silence.
    assert [line for line in ended if "nothing heard for" not in line] == []
    world.governed()


def held_up_s(world: World) -> float:
    """Return for how long a fork of the engine core, between two steps, is held up."""
    held_s = world.engine.fork().fork_held_s
    wait_for(lambda: world.engine.run().steps > 0, 20, "a step")
    return held_s


def shown_well(world: World) -> bool:
    """Return whether the control plane shows a healthy engine and the number of reports dropped during the fault."""
    metrics, engine = world.scene.control.metrics(), world.scene.control.engine()
    dropped = world.engine.run().dropped
    return (
        (engine.engine_id, engine.fault, engine.nack_error) == ("chaos", "", "")
        and metrics['meridian_engine_state{engine="chaos",state="ready"}'] == 1
        # A session that has just begun has no report yet, and so no counters of its agent.
        and metrics.get('meridian_agent_reports_dropped_total{engine="chaos"}') == dropped
    )


def met(fault: Fault, before: dict[str, dict[str, int]], now: dict[str, dict[str, int]]) -> bool:
    """Return whether everything that the network does to packets during a fault has happened to one. before, now:
    packets by direction and fate."""
    return all(
        now[way].get(fate, 0) > before[way].get(fate, 0)
        for way, conditions in fault.conditions.items()
        for fate in conditions.fates
    )


def shown(fault: Fault, reports: list[Report], began_s: float) -> bool:
    """Return whether a fault has lasted long enough to show in the requests' tokens."""
    if fault.loses:
        return len(ungoverned(reports, began_s)) >= DURING
    return len(finished(reports)) >= 2 * DURING and time.monotonic() - began_s > LASTS_S


def ungoverned(reports: list[Report], began_s: float) -> list[Done]:
    """Return the requests that began during a fault after the end of all leases.

    On a busy machine the leases may have ended before the fault began. A report begins with the newest state before it.
    """
    states = [seen for report in reports for seen in report.states]
    at_begin = next((state for at_s, state, _ in reversed(states) if at_s <= began_s), "")
    later = [(at_s, state) for at_s, state, _ in states if at_s > began_s]
    stays = at_begin == "DEGRADED" and all(state != "READY" for _, state in later)
    since_s = began_s if stays else next((at_s for at_s, state in later if state == "DEGRADED"), float("inf"))
    return [done for done in finished(reports) if done.began_s > since_s]
