"""What the agent reports of a request that another engine has begun."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from meridian_agent.core.directives import Directives
from meridian_agent.core.tracker import Tracker
from meridian_agent.engine.hand_over import HandOverRunner
from tests.fakes.engine import MARKERS, opened


@pytest.mark.parametrize(("ago_s", "at_least_ms"), [(2.0, 2000.0), (-3600.0, 0.0)])
def test_the_time_to_the_first_token_is_never_negative(ago_s: float, at_least_ms: float) -> None:
    """vLLM notes the arrival by the time of day, which may have been set back by an hour since."""
    tracker = Tracker(MARKERS)
    runner = HandOverRunner(tracker, Directives(tracker).hand_overs, None, True)
    request: Any = SimpleNamespace(arrival_time=time.time() - ago_s, num_computed_tokens=1)
    live = opened(tracker, "a", ref=request, handed_over_ref="ref")
    runner.opened(live.info)
    runner.generated(live, SimpleNamespace(prefill_stats=None))
    ((slot, _, waited_ms),) = tracker.record.continued
    assert slot == live.slot
    assert waited_ms >= at_least_ms
    if ago_s < 0:
        assert waited_ms == 0
