"""The numbers of phases in vLLM's own metrics, on the shared engine. `test_served.py` and `test_effort.py` scrape them
from vLLM's servers, with one API server process and with two."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import REGISTRY

from meridian_agent.core.phases import begin
from meridian_agent.vllm_adapter import phase_numbers
from meridian_agent.vllm_adapter.server_metrics import KV_TOKENS, NAMES, REQUESTS
from tests.engine import Run, cases, chat, paced, prompt_ids
from tests.engine.pacing import Settled
from tests.engine.policies import CONVERGED
from tests.engine.test_decisions import endless, opened
from tests.engine.test_equality import GREEDY, WHOLE
from tests.engine.test_metrics import scraped
from tests.processes import Control

LABELS = {"model_name": "maze", "engine": "0"}
COUNTERS = (
    "meridian_vllm_think_tokens_total",
    "meridian_vllm_tokens_saved_against_cap_total",
    "meridian_vllm_ttfvt_seconds_count",
)


def counters() -> list[float]:
    return [REGISTRY.get_sample_value(name, LABELS) or 0.0 for name in COUNTERS]


def by_phase(name: str) -> dict[str, float]:
    found = {phase: REGISTRY.get_sample_value(name, {**LABELS, "phase": phase}) for phase in NAMES}
    return {phase: value for phase, value in found.items() if value}


def test_counters_are_exact(llm: Any, agent: Any) -> None:
    before, markers = counters(), agent.tracker.markers
    states = []
    for case, tokens in zip(cases(), chat(llm, cases(), GREEDY), strict=True):
        state = begin(markers, prompt_ids(llm, case), True)
        for token in tokens:
            state.feed(token, markers)
        states.append(state)
    think_tokens, saved_tokens, answers = (after - was for after, was in zip(counters(), before, strict=True))
    assert think_tokens == sum(state.think_tokens for state in states) > 0
    assert answers == sum(state.output_tokens > 0 for state in states) > 0
    assert saved_tokens == 0
    assert by_phase(REQUESTS) == by_phase(KV_TOKENS) == {}


def test_gauges_follow_a_request(llm: Any, agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase_numbers, "INTERVAL_S", 0.0)
    run, end = Run(llm), agent.tracker.markers.end[0]
    run.add("thinks", opened(), endless(agent, max_tokens=900))
    run.until(lambda: len(run.tokens["thinks"]) > 3)
    assert by_phase(REQUESTS) == {"think": 1}
    held = by_phase(KV_TOKENS)
    assert held == {"think": len(prompt_ids(llm, opened())) + len(run.tokens["thinks"]) - 1}
    run.add("thinks not", {**opened(), "template": {"enable_thinking": False}}, endless(agent, max_tokens=900))
    run.until(lambda: len(run.tokens["thinks not"]) > 3)
    assert by_phase(REQUESTS) == {"think": 1, "output": 1}
    assert end not in run.tokens["thinks"]
    run.abort("thinks")
    assert by_phase(REQUESTS) == {"output": 1}
    run.abort("thinks not")
    assert by_phase(REQUESTS) == by_phase(KV_TOKENS) == {}


def test_tokens_that_rules_save(llm: Any, agent: Any, control: Control, settled: Settled) -> None:
    """The engine counts what the control plane counts."""

    def counted() -> float:
        control.settled()
        return scraped(control)[0]["meridian_tokens_saved_against_cap_total"]

    control.apply({**CONVERGED, "scheduler": {"max_think_tokens": 200, "min_think_tokens": 4}})
    before, told = counters(), counted()
    paced(llm, cases(), WHOLE, settled)
    assert counters()[1] - before[1] == counted() - told > 0
