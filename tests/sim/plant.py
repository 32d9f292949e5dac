"""One engine of a run, with the books that are kept about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.sim.books import EngineBooks
from tests.sim.engine import Engine, Script, Shape

if TYPE_CHECKING:
    from meridian.v1 import agent_pb2

    from tests.sim.network import SteppedLink
    from tests.sim.world import World


class NoFile:
    """A state file that keeps nothing, because the simulator has no disk."""

    def __init__(self, *_: Any) -> None:
        pass

    def load(self) -> None:
        return None

    def keep(self, settings: agent_pb2.Settings) -> None:
        pass


class Plant:
    """One engine with its books; a restart gives it a new process."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.shape = world.options.shape or Shape.draw(world.rng)
        self.link: SteppedLink | None = None
        self.start()

    def start(self) -> None:
        world = self.world
        known = len(world.network.links)
        world.patch.setenv("MERIDIAN_ENGINE_ID", self.name)
        drafts, ahead = self.shape.drafts, 2 if self.shape.is_async else 1
        world.invariants.hidden_drafts[self.name] = ahead * drafts + ahead - 1 if self.shape.hidden else 0
        self.books = EngineBooks(world.invariants, world.timeline.time)
        self.books.may_fail = world.injected is not None
        self.engine = engine = Engine(self.shape, self.books.on_token, world.governed)
        self.link = world.network.links[known] if world.governed else None
        self.books.attach(engine, self.link)
        if world.governed:
            assert not engine.scheduler._guard.fault, engine.scheduler._guard.text

    def restart(self) -> None:
        """Kill the process with its requests; the control plane is not told at once."""
        assert self.link is not None
        self.link.stop()
        if self.link.stream is not None:
            self.link.stream.break_off(0.0, None)
        self.world.network.links.remove(self.link)
        self.start()

    def open(self, name: str, prompt: list[int], script: Script, own: dict[str, Any]) -> None:
        self.engine.open(name, prompt, script, own)
        self.books.open(name, prompt, script.max_tokens, own.get("meridian_max_think_tokens"))

    def step(self) -> None:
        if not self.engine.busy():
            return
        steps = len(self.engine.schedule)
        self.engine.step(self._between, self._sampling)
        if len(self.engine.schedule) > steps:
            self.books.after_step()

    def _between(self) -> None:
        """Deliver messages while the model runs."""
        if self.world.governed:
            scheduled = self.engine.schedule[-1]
            self.world.timeline.advance(self.world.step_ms * (1 + 0.3 * len(scheduled)) / 1e3)
            if self.world.rng.random() < 0.3:
                self.world.network.tick()
        self.books.before_masks()

    def _sampling(self) -> None:
        """Deliver messages after the masks have been made."""
        if self.world.governed and self.world.rng.random() < 0.2:
            self.world.timeline.advance(self.world.step_ms / 5e3)
            self.world.network.tick()
