"""Policies for single requests on the real engine: overrides, own parameters, empty answers, grammars without
thinking."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from meridian_agent.core import probe_admission as place_reserve
from tests.data import maze
from tests.engine import STRIPPED, Run, cases, chat, paced, prompt_ids
from tests.engine.pacing import Settled
from tests.engine.policies import DENSE, NEUTRAL
from tests.engine.recording import probes, records
from tests.engine.test_decisions import endless, opened
from tests.processes import Control


def test_effort_and_tenant_map_to_budgets(llm: Any, agent: Any, control: Control, settled: Settled) -> None:
    """In one batch, each request is capped by the override that its own parameters match, clamped by policy."""
    low = {"effort": "low", "scheduler": {"max_think_tokens": 21}}
    batch = {"tenant": "batch-*", "slo_class": "bulk", "scheduler": {"max_think_tokens": 33}}
    control.apply({"scheduler": {"max_think_tokens": 60}, "override": [batch, low]})
    own: list[dict[str, Any]] = [
        {},
        {"meridian_effort": "low"},
        {"meridian_tenant": "batch-7", "meridian_slo_class": "bulk"},
        {"meridian_tenant": "batch-7", "meridian_slo_class": "chat"},
        {"meridian_tenant": "batch-7", "meridian_slo_class": "bulk", "meridian_max_think_tokens": 5},
        {"meridian_effort": "low", "meridian_max_think_tokens": 40},
        {"meridian_max_think_tokens": 0},
    ]
    params = [endless(agent, max_tokens=70, extra_args=words) for words in own]
    end = agent.tracker.markers.end[0]
    runs = paced(llm, [opened()] * len(own), params, settled)
    assert [tokens.index(end) for tokens in runs] == [60, 21, 33, 60, 5, 21, 0]
    control.settled()


def test_a_rule_can_be_off_for_one_tenant_and_held_back_by_a_floor(
    llm: Any, agent: Any, control: Control, settled: Settled
) -> None:
    careful = {"tenant": "careful", "entropy": {"enabled": False}}
    at_once = {"shadow": False, "holdout_share": 0.0, "rank_conditions": [{"max_ranks": [100_000]}]}
    control.apply({"scheduler": {"min_think_tokens": 0}, "entropy": at_once, "override": [careful]})
    words: list[dict[str, Any]] = [{}, {"meridian_tenant": "careful"}, {"meridian_min_think_tokens": 40}]
    params = [endless(agent, max_tokens=60, extra_args=own) for own in words]
    plain, never, floor = paced(llm, [opened()] * 3, params, settled)
    end = agent.tracker.markers.end[0]
    assert end not in never
    assert plain.index(end) < 40 <= floor.index(end)
    control.settled()


@pytest.mark.parametrize(("extension", "expected"), [(0, 30), (20, 50)])
def test_thinking_is_extended_where_the_answer_would_be_empty(  # noqa: PLR0917
    llm: Any, agent: Any, control: Control, settled: Settled, extension: int, expected: int
) -> None:
    """Every node is a stop token, held back at first: a token after the end marker would otherwise finish the
    request."""
    limits = {"max_think_tokens": 30, "min_think_tokens": 0, "empty_answer_extension_tokens": extension}
    control.apply({"scheduler": limits, "entropy": {"enabled": False}})
    before = dict(control.settled().decisions)
    nodes = llm.get_tokenizer().convert_tokens_to_ids(list(maze.NODES))
    stops = endless(agent, max_tokens=90, min_tokens=80, stop_token_ids=nodes)
    plain = endless(agent, max_tokens=90)
    end = agent.tracker.markers.end[0]
    run = Run(llm)
    run.add("stops", opened(), stops)
    run.add("plain", opened(), plain)
    run.until(settled=settled)
    assert [run.tokens[name].index(end) for name in ("stops", "plain")] == [expected, 30]
    assert control.settled().decisions["probe"] - before.get("probe", 0) == (2 if extension else 0)


def test_no_end_is_forced_into_an_answer_that_a_grammar_constrains(
    llm: Any, agent: Any, control: Control, settled: Settled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a reasoning parser vLLM's grammar constrains the text from the first token on, also if the prompt opens
    thinking and the grammar would allow the end marker."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    monkeypatch.setattr(scheduler.structured_output_manager, "reasoner_cls", None)
    call = StructuredOutputsParams(regex="[A-X]{30}</think>(walk){3}")
    sampling = {"max_tokens": 60, "extra_args": STRIPPED}
    params = [endless(agent, **sampling, ignore_eos=False, structured_outputs=call), endless(agent, **sampling)]
    control.apply(NEUTRAL)
    whole, free = chat(llm, [opened(0)] * 2, params)
    assert whole.index(agent.tracker.markers.end[0]) == 30
    # An answer that its largest number of tokens has cut keeps its blocks, which counts as refused, too.
    control.apply(
        {"scheduler": {"max_think_tokens": 9}, "entropy": {"enabled": False}, "kv_memory": {"enabled": False}}
    )
    before = dict(control.settled().outcomes)
    # The control plane keeps pace, so its caps arrive before the requests have ended.
    capped, ended = paced(llm, [opened(0)] * 2, params, settled)
    assert capped == whole
    assert ended[:10] == [*free[:9], agent.tracker.markers.end[0]]
    after = control.settled().outcomes
    assert after["refused"] == before.get("refused", 0) + 1


@pytest.mark.usefixtures("probe_requests")
def test_probes_of_salted_requests(llm: Any, agent: Any, control: Control, settled: Settled) -> None:
    """A cache salt keeps prompts apart: a probe shares its own request's blocks and is as cheap as any other."""
    control.apply(DENSE)
    run, params = Run(llm), SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    run.put("salted", prompt_ids(llm, opened()), params, salt="one")
    with records(agent) as seen:
        run.until(settled=settled)
    (measured,) = probes(seen).values()
    assert {probe.cost_tokens for probe in measured} == {2}
    control.settled()


@pytest.mark.usefixtures("probe_requests")
def test_places_are_kept_for_probes_when_the_engine_is_full(
    llm: Any, agent: Any, control: Control, settled: Settled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more requests than places: without a reserve no request is ever probed; with one, tokens stay the
    same."""
    chosen = [opened(i % 6) for i in range(16)]
    params = [endless(agent, max_tokens=40 + i) for i in range(16)]
    control.apply(DENSE)
    reference = chat(llm, chosen, params)
    monkeypatch.setattr(place_reserve, "PLACE_SHARE", 2)
    before, preempted = agent.probing.tokens, agent.preempted_think
    assert paced(llm, chosen, params, settled) == reference
    assert agent.probing.tokens > before + 2 * 100
    assert agent.preempted_think == preempted
    control.settled()


def test_a_full_engine_computes_probes_as_rows(llm: Any, agent: Any, control: Control, settled: Settled) -> None:
    """A probe that is a row of its request needs no place among the running requests, and changes no token."""
    chosen, params = [opened(i % 6) for i in range(8)], endless(agent, max_tokens=60, extra_args=STRIPPED)
    control.apply(NEUTRAL)
    reference = chat(llm, chosen, params)
    control.apply({**DENSE, "kv_memory": {"enabled": False}})
    with records(agent) as seen:
        assert paced(llm, chosen, params, settled) == reference
    assert [detail for record, *_ in seen for _, outcome, _, detail, _ in record.outcomes if outcome == 6] == []
    measured = probes(seen).values()
    assert len(measured) == len(chosen)
    assert all(len(each) > 10 for each in measured)
    control.settled()


@pytest.mark.usefixtures("probe_requests")
def test_probes_that_cannot_run_are_refused_with_the_reason(
    llm: Any, agent: Any, control: Control, settled: Settled
) -> None:
    """As many requests as the engine may run leave no place: no request is preempted, and every probe has its
    outcome."""
    control.apply(DENSE)
    before = agent.preempted_think
    with records(agent) as seen:
        paced(llm, [*cases(), *cases()[:2]], endless(agent, max_tokens=60), settled)
    details = {detail for record, *_ in seen for _, outcome, _, detail, _ in record.outcomes if outcome == 6}
    assert "no running place to spare" in details
    assert agent.preempted_think == before
    control.settled()


def test_a_trace_context_is_handed_on(llm: Any, agent: Any, control: Control) -> None:
    """vLLM passes on the header of a request if it traces itself; without the header there is no trace context."""
    control.apply({})
    parent, run = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", Run(llm)
    with records(agent) as seen:
        run.add("traced", opened(), SamplingParams(max_tokens=4), trace_headers={"traceparent": parent})
        run.add("plain", opened(1), SamplingParams(max_tokens=4))
        run.until()
    assert sorted(info.traceparent for _, rows, *_ in seen for _, info, *_ in rows) == ["", parent]
    control.settled()
