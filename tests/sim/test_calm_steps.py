"""Calm steps change nothing: each run gives the same messages with and without them."""

from __future__ import annotations

import re

import pytest

from tests.needed import VLLM

pytest.importorskip("vllm", reason=VLLM.reason)

from meridian_agent.engine.calm_steps import CalmSteps
from tests.sim.world import Options, run

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
    hold, calm = CalmSteps.hold, []

    def noting(self: CalmSteps) -> bool:
        held = hold(self)
        calm.append(held)
        return held

    for seed in range(first, first + BATCH):
        monkeypatch.setattr(CalmSteps, "hold", noting)
        found = messages(seed)
        monkeypatch.setattr(CalmSteps, "hold", lambda _: False)
        assert found == messages(seed), f"seed {seed}"
    assert calm.count(True) > 100
    assert calm.count(False) > 100
