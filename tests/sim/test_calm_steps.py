"""Calm steps, and steps of text whose records the link makes, change nothing: each run gives the same messages with and
without them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.needed import VLLM

pytest.importorskip("vllm", reason=VLLM.reason)

from meridian_agent.engine.calm_steps import CalmSteps
from meridian_agent.engine.step_accounting import StepAccounting
from tests.sim.engine import DRAFTS, Shape
from tests.sim.world import Options, run

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore")
SEEDS, BATCH = 48, 12
# The counters of calm and full steps in a message.
COUNTERS = re.compile(r"(calm|full)_steps: \d+ ")
# Engines with drafts that vLLM's scheduler knows, and that only the workers know.
DRAFTED = {
    "drafts": Shape(drafts=DRAFTS, blocks=64),
    "hidden drafts": Shape(drafts=DRAFTS, hidden=True, blocks=64),
    "async drafts": Shape(is_async=True, drafts=DRAFTS, hidden=True, blocks=64),
}


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
    """Return all messages of a run in order, as text, without the counters of calm and full steps."""
    trace = run(seed, Options(trace=True, shape=shape)).invariants.trace
    assert trace
    return [COUNTERS.sub("", line).replace("counters { } ", "") for line in trace]


def compare(first: int, patch: pytest.MonkeyPatch, calm: Noted, text: Noted, shape: Shape | None = None) -> None:
    """Compare the messages of each seed with and without calm steps, and check that steps of both kinds were noted."""
    for seed in range(first, first + BATCH):
        calm.install(patch, CalmSteps)
        text.install(patch, StepAccounting)
        found = messages(seed, shape)
        patch.setattr(CalmSteps, "hold", lambda *_: False)
        patch.setattr(StepAccounting, "take_text", lambda *_: False)
        assert found == messages(seed, shape), f"seed {seed}"
    for noted in (calm, text):
        assert noted.results.count(True) > 2 * BATCH
        assert noted.results.count(False) > 2 * BATCH


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_the_messages_are_the_same_without_calm_steps(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calm, text = Noted(CalmSteps.hold), Noted(StepAccounting.take_text)
    compare(first, monkeypatch, calm, text)


@pytest.mark.parametrize("shape", DRAFTED.values(), ids=DRAFTED)
def test_the_messages_are_the_same_with_drafts(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of text count only if they bring a request several tokens."""

    def accepts(_: Any, __: Any, result: Any, *___: Any) -> bool:
        return any(len(new) > 1 for new in result.sampled_token_ids)

    calm, text = Noted(CalmSteps.hold), Noted(StepAccounting.take_text, accepts)
    compare(SEEDS, monkeypatch, calm, text, shape)
