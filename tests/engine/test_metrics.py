"""The value of every metric in the catalogue with a real engine, as it is scraped from the control plane."""

from __future__ import annotations

import urllib.request
from collections import defaultdict
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from vllm import SamplingParams

from meridian_control.capabilities.listed import CAPABILITIES
from meridian_control.telemetry.catalogue import AGENTS, ENGINES, catalogue
from tests.engine import SHORT, STRIPPED, Run, cases, chat, choose, paced
from tests.engine.pacing import Settled
from tests.engine.policies import CONVERGED, DENSE
from tests.engine.test_decisions import endless
from tests.engine.test_pressure import pressure
from tests.processes import RPC_S, Control, wait_for

SHADOWED = {**CONVERGED, "entropy": {**CONVERGED["entropy"], "shadow": True}}
SHARE = 0.5
HALF_HELD = {
    **CONVERGED,
    "entropy": {**CONVERGED["entropy"], "holdout_share": SHARE},
    "budget": [{"name": "all", "tokens_per_minute": 1_000_000}],
    # Every window with enough answer tokens misses this target.
    "pressure": [{"name": "missed", "output_itl_p99_ms": 0.001, "window_s": 1, "shadow": True}],
}
CASES = [{"prompt": prompt, "template": {"open_think": True}} for prompt in SHORT[:6]]
METRICS = catalogue(CAPABILITIES)
BUDGET = "meridian_budget_think_tokens_total"
OF_WINDOWS = ("meridian_pressure_changes_total", "meridian_pressure_missed_windows_total")
# Metrics that stay at 0 for a healthy engine with budgets that follow it. `test_handover.py` feeds the handovers, which
# need a second engine, `test_embeddings.py` the unread prompts, which need a server with `--enable-prompt-embeds`, and
# `test_gateway.py` the refused SLO classes, which need a gateway.
QUIET = {
    "meridian_client_faults_total",
    "meridian_policy_nacks_total",
    "meridian_refused_slo_classes_total",
    "meridian_unknown_outcomes_total",
    "meridian_stream_ends_total",
    "meridian_agent_output_critical_total",
    "meridian_agent_reports_dropped_total",
    "meridian_agent_think_skips_total",
    "meridian_agent_faults_total",
    "meridian_handovers_total",
    "meridian_preempted_for_waiting_total",
    "meridian_agent_recomputed_tokens_total",
    "meridian_unread_prompts_total",
}


def scraped(control: Control) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return the sum of each metric's samples (for a histogram, its observations), and each engine metric's samples."""
    with urllib.request.urlopen(f"http://{control.options[-1]}/metrics", timeout=RPC_S) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    sums, engines = defaultdict[str, float](float), defaultdict[str, dict[str, float]](dict)
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        for sample in family.samples:
            if sample.name in (name, f"{name}_count"):
                sums[name] += sample.value
                if "engine" in sample.labels:
                    engines[name]["/".join(sample.labels.values())] = sample.value
    return sums, engines


def test_every_metric_is_fed_by_a_real_engine(
    llm: Any, agent: Any, control: Control, settled: Settled, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, _ = scraped(control)
    control.apply(DENSE)
    thinking, _ = pressure(llm, agent, control)
    sampled = SamplingParams(temperature=1.0, seed=1, max_tokens=400, extra_args=STRIPPED)
    control.apply(SHADOWED)
    paced(llm, CASES, sampled, settled)
    control.apply(CONVERGED)
    paced(llm, CASES, sampled, settled)
    control.apply(HALF_HELD)
    choose(monkeypatch, SHARE, {f"paced-{number}": number % 2 == 0 for number in range(len(CASES))})
    paced(llm, CASES, sampled, settled)
    run = Run(llm)
    run.add("answers", {**cases()[2], "template": {"enable_thinking": False}}, endless(agent, max_tokens=900))

    def windows_end() -> bool:
        found, _ = scraped(control)
        return all(found[name] > before.get(name, 0) for name in OF_WINDOWS)

    run.until(windows_end, settled=settled)
    run.abort("answers")
    chat(llm, cases()[:1], SamplingParams(temperature=1.0, seed=1, max_tokens=400, extra_args={"meridian_effort": "?"}))
    control.settled()
    # Tokens are counted for budgets once a second.
    wait_for(lambda: scraped(control)[0][BUDGET] > before.get(BUDGET, 0), RPC_S, "tokens of the budget")
    after, engines = scraped(control)
    grown = {name: after[name] - before.get(name, 0) for name, entry in METRICS.items() if entry.kind != "gauge"}
    quiet = {name for name, growth in grown.items() if growth <= 0 and not name.startswith("grpc_server_handl")}
    assert quiet <= QUIET
    # Preemptions of the sampled requests are added to these.
    assert grown["meridian_preemptions_total"] >= thinking > 0
    for entry in (*ENGINES, *AGENTS):
        assert engines[entry.name] or entry.name == "meridian_agent_faults_total", entry.name
    one = {name: next(iter(samples.values())) for name, samples in engines.items() if samples}
    assert one["meridian_engine_revision"] == one["meridian_engine_wanted_revision"] > 0
    assert 0 <= one["meridian_engine_kv_used_ratio"] <= 1
    for name in (
        "agent_round_trip_seconds",
        "engine_step_seconds",
        "agent_seconds_total",
        "agent_scheduler_seconds_total",
    ):
        assert one[f"meridian_{name}"] > 0
    assert grown["meridian_tokens_saved_shadow_estimate_total"] <= 2 * grown["meridian_shadow_think_tokens_total"]
