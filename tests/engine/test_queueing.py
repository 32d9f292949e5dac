"""The queueing times that the control plane gets from a real engine are those that vLLM itself measures."""

from __future__ import annotations

import time
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.engine import CASES, Run, cases
from tests.engine.policies import NEUTRAL
from tests.engine.queueing import compared
from tests.engine.test_decisions import endless, opened
from tests.engine.test_pressure import half_the_cache
from tests.processes import RPC_S, Control, wait_for

# The requests are three times as many as the engine has places, and together they need more than half of its KV.
REQUESTS = 24
METRIC = "meridian_queueing_seconds"
# Every window with enough requests misses this target, in milliseconds.
MISSED_MS = 0.001


def measured(control: Control) -> tuple[float, float]:
    """Return the number of queueing times that the control plane has got so far, and their sum in seconds."""
    with urllib.request.urlopen(f"http://{control.options[-1]}/metrics", timeout=RPC_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    found = {one.name: one.value for family in families for one in family.samples if family.name == METRIC}
    return found[f"{METRIC}_count"], found[f"{METRIC}_sum"]


def test_queueing_times_are_vllms_own(llm: Any, agent: Any, control: Control, scheduler: Any) -> None:
    before, preempted = measured(control), agent.preempted_think
    run = Run(llm)
    with half_the_cache(llm), compared(llm, scheduler, agent) as times_ms:
        for i in range(REQUESTS):
            run.add(f"r{i}", opened(i % CASES), endless(agent, max_tokens=120))
        began_s = time.monotonic()
        run.until(lambda: bool(run.finished))
        first_ms = (time.monotonic() - began_s) * 1e3
        run.until()
    assert agent.preempted_think > preempted, "some requests wait a second time, which does not count"
    assert len(times_ms) == REQUESTS
    assert max(times_ms) > first_ms, "the last ones wait for others to end"
    control.settled()
    count, total_s = measured(control)
    assert count - before[0] == REQUESTS
    assert total_s - before[1] == pytest.approx(sum(times_ms) / 1e3)


def test_a_target_for_queueing_time_is_missed(llm: Any, agent: Any, control: Control) -> None:
    entry = {"name": "queue", "queueing_p99_ms": MISSED_MS, "window_s": 1, "shadow": True}
    control.apply({**NEUTRAL, "pressure": [entry]})

    def missed() -> Any:
        run = Run(llm)
        for i in range(REQUESTS):
            run.add(f"r{i}", cases()[i % CASES], endless(agent, max_tokens=5))
        run.until()
        control.settled()
        (shown,) = control.engine().pressures
        return shown.changes

    (change, *_) = wait_for(missed, RPC_S, "a window with enough requests")
    assert change.reading.target == "queueing_p99_ms"
    assert change.reading.samples >= 10
    assert change.reading.measured > MISSED_MS
