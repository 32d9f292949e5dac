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
from tests.sim.world import Options, run

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore")
SEEDS, BATCH = 48, 12
# The counters of calm and full steps in a message.
COUNTERS = re.compile(r"(calm|full)_steps: \d+ ")


def messages(seed: int) -> list[str]:
    """Return all messages of a run in order, as text, without the counters of calm and full steps."""
    trace = run(seed, Options(trace=True)).invariants.trace
    assert trace
    return [COUNTERS.sub("", line).replace("counters { } ", "") for line in trace]


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_the_messages_are_the_same_without_calm_steps(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hold, take_text, calm, text = CalmSteps.hold, StepAccounting.take_text, list[bool](), list[bool]()

    def noting(function: Callable[..., bool], noted: list[bool]) -> Callable[..., bool]:
        def noted_function(*args: Any) -> bool:
            noted.append(function(*args))
            return noted[-1]

        return noted_function

    for seed in range(first, first + BATCH):
        monkeypatch.setattr(CalmSteps, "hold", noting(hold, calm))
        monkeypatch.setattr(StepAccounting, "take_text", noting(take_text, text))
        found = messages(seed)
        monkeypatch.setattr(CalmSteps, "hold", lambda *_: False)
        monkeypatch.setattr(StepAccounting, "take_text", lambda *_: False)
        assert found == messages(seed), f"seed {seed}"
    for noted in (calm, text):
        assert noted.count(True) > 100
        assert noted.count(False) > 100
