"""Calm steps, and steps of text whose records the link makes, change nothing: each run gives the same messages with and
without them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.needed import VLLM

pytest.importorskip("vllm", reason=VLLM.reason)

from collections.abc import Callable

from meridian_agent.engine import step_accounting
from meridian_agent.engine.calm_steps import CalmSteps
from meridian_agent.engine.step_accounting import StepAccounting
from meridian_agent.link import outbox
from meridian_control.policy.model import Policy
from tests.sim.clock import stored
from tests.sim.engine import DRAFTS, Model, Script, Shape, words
from tests.sim.plant import Plant
from tests.sim.test_sim import started
from tests.sim.world import Options, World, run

pytestmark = pytest.mark.filterwarnings("ignore")
SEEDS = 6
# The counters of calm and full steps in a message; and the gauges, which are read when its report is made if its last
# step is one of text: with faults the engine may have made further steps by then.
COUNTERS = re.compile(r"(calm|full)_steps: \d+ ")
GAUGES = re.compile(r"\b(kv_used|running|waiting): \S+ ")
# Engines with drafts that vLLM's scheduler knows, and that only the workers know.
DRAFTED = {
    "drafts": Shape(drafts=DRAFTS, blocks=64),
    "hidden drafts": Shape(drafts=DRAFTS, hidden=True, blocks=64),
    "async drafts": Shape(is_async=True, drafts=DRAFTS, hidden=True, blocks=64),
}


@pytest.mark.parametrize("is_async", [False, True])
def test_an_end_is_seen_whose_marker_has_several_tokens_since_the_run_began(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy names another end marker while all requests are in the run."""
    start, end, stop, text = words()
    written = [*[text[1]] * 25, text[0], end, *[text[2]] * 30, stop]
    monkeypatch.setattr(Model, "wish", lambda model, name: written[min(len(model.tokens[name]), len(written)) - 1])
    cap = {"entropy": {"enabled": False}, "scheduler": {"soft_think_tokens": 0, "max_think_tokens": 40}}
    markers = {"think_start_token_ids": [start], "think_end_token_ids": [text[0], end]}
    with started(Shape(is_async=is_async, places=8, blocks=200), Policy.model_validate(cap)) as world:
        (plant,) = world.plants
        with world.timeline.running():
            plant.open("r", [start], Script(1, 10**6, 5, restless=False, max_tokens=90), {})
            until(world, plant, 8)
            assert plant.engine.agent.tracker.run.members == 1
            world.revision += 1
            policy = Policy.model_validate({**cap, "model": {"m": markers}})
            world.server.put_in_force(stored(world.revision, policy))
            until(world, plant, 20)
            assert plant.engine.agent.tracker.markers.longest == 2
    # An engine that schedules ahead has sampled one more token.
    assert plant.engine.model.tokens["r"][1 : 1 + len(written)] == written


def until(world: World, plant: Plant, tokens: int) -> None:
    """Let time pass until the request has this many tokens."""
    while len(plant.engine.model.tokens["r"]) <= tokens:
        world.pass_time(0.005)


@pytest.mark.parametrize("cap", [None, 60])
@pytest.mark.parametrize("is_async", [False, True])
def test_the_messages_are_the_same_without_postponed_steps(
    is_async: bool, cap: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, *_ = words()
    policy = Policy.model_validate({"scheduler": {"max_think_tokens": cap}} if cap else {})

    def messages() -> list[str]:
        with started(Shape(is_async=is_async, places=8, blocks=400), policy) as world:
            world.patch.setattr(outbox, "RING_RECORDS", 256)
            world.patch.setattr(step_accounting, "POSTPONED_S", 10.0)
            (plant,) = world.plants
            for number in range(4):
                script = Script(number, 200, 100, restless=number == 2, max_tokens=400, loop=10 * (number == 3))
                plant.open(f"r{number}", [start], script, {})
        return [COUNTERS.sub("", line) for line in world.invariants.trace or ()]

    noted = Noted(StepAccounting.postpone)
    noted.install(monkeypatch, StepAccounting)
    found = messages()
    assert noted.results.count(True) > 60
    assert noted.results.count(False) > 40
    monkeypatch.setattr(StepAccounting, "postpone", lambda *_: False)
    assert found == messages()


class Noted:
    """The results of a method in a run. when: whether the result of a call with these arguments counts."""

    def __init__(self, function: Callable[..., bool], when: Callable[..., bool] = lambda *_: True) -> None:
        self.function, self._when, self.results = function, when, list[bool]()

    def install(self, patch: pytest.MonkeyPatch, owner: type) -> None:
        def method(*args: Any) -> bool:
            result = self.function(*args)
            if self._when(*args):
                self.results.append(result)
            return result

        patch.setattr(owner, self.function.__name__, method)


def messages(seed: int, shape: Shape | None) -> list[str]:
    """Return all messages of a run in order, as text, without the counters of calm and full steps, and the gauges."""
    trace = run(seed, Options(trace=True, shape=shape)).invariants.trace
    assert trace
    return [GAUGES.sub("", COUNTERS.sub("", line)).replace("counters { } ", "") for line in trace]


def compare(first: int, patch: pytest.MonkeyPatch, calm: Noted, text: Noted, shape: Shape | None = None) -> None:
    """Compare the messages of each seed with and without calm steps, and check that steps of both kinds were noted. No
    step is postponed, because with faults some reports would have other steps."""
    patch.setattr(StepAccounting, "postpone", lambda *_: False)
    for seed in range(first, first + SEEDS):
        calm.install(patch, CalmSteps)
        text.install(patch, StepAccounting)
        found = messages(seed, shape)
        patch.setattr(CalmSteps, "hold", lambda *_: False)
        patch.setattr(StepAccounting, "take_text", lambda *_: False)
        assert found == messages(seed, shape), f"seed {seed}"
    for noted in (calm, text):
        assert noted.results.count(True) > 2 * SEEDS
        assert noted.results.count(False) > 2 * SEEDS


def test_the_messages_are_the_same_without_calm_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    calm, text = Noted(CalmSteps.hold), Noted(StepAccounting.take_text)
    compare(0, monkeypatch, calm, text)


@pytest.mark.parametrize("shape", DRAFTED.values(), ids=DRAFTED)
def test_the_messages_are_the_same_with_drafts(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of text count only if they bring a request several tokens."""

    def accepts(_: Any, __: Any, result: Any, *___: Any) -> bool:
        return any(len(new) > 1 for new in result.sampled_token_ids)

    calm, text = Noted(CalmSteps.hold), Noted(StepAccounting.take_text, accepts)
    compare(2 * SEEDS, monkeypatch, calm, text, shape)
