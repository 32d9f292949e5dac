"""Signals measured in the engine, compared with an independent computation by Transformers on the same tokens."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from meridian_agent.core.phases import FLAG_SENTENCE, Phase
from meridian_agent.core.sentences import ROW_FLAGS
from meridian_control.engine.settings_delivery import USUAL_INTERVAL_STEPS
from tests.engine import Run, cases, chat, choose, paced, prompt_ids
from tests.engine.offline import load, mismatches, probe_mismatches
from tests.engine.pacing import Settled
from tests.engine.policies import DENSE, NEUTRAL, SENTENCE_ENDS
from tests.engine.recording import probes, records, rows
from tests.engine.test_decisions import endless, opened
from tests.processes import Control, wait_for


@pytest.fixture(scope="module")
def offline() -> Any:
    return load()


def test_token_signals(llm: Any, agent: Any, offline: Any) -> None:
    """In a mixed batch at temperature 1, entropy matches to 1e-5 nats, the end marker's rank exactly, and its
    log-probability and margin to 5e-5."""
    chosen = cases()
    with records(agent) as seen:
        generated = chat(llm, chosen, SamplingParams(temperature=1.0, max_tokens=80, seed=7))
    (start,), (end,) = agent.tracker.markers.starts[0], agent.tracker.markers.ends[0]
    by_request = rows(seen)
    assert len(by_request) == len(chosen)
    for case, tokens, measured in zip(chosen, generated, by_request.values(), strict=True):
        prompt = prompt_ids(llm, case)
        assert not mismatches(offline, prompt, tokens, measured, end)
        logprobs = offline(prompt + tokens, everywhere=True)[len(prompt) - 1 : -1]
        expected = logprobs[:, end]
        # The larger tolerance is for single logits: two implementations round float32 differently.
        # A start marker that the model writes itself is not measured, because the request does not think before it.
        thinking = [i for i, m in enumerate(measured) if m[0] == Phase.THINK and tokens[i] != start]
        assert [measured[i][4] for i in thinking] == pytest.approx(expected[thinking], abs=5e-5)
        own = [m for token, m in zip(tokens, measured, strict=True) if token == start]
        assert all(math.isnan(m[2]) for m in own)
        margins = (logprobs.max(axis=1) - expected)[thinking]
        assert [measured[i][5] for i in thinking] == pytest.approx(margins, rel=0, abs=5e-5)
        answer = [m for before, m in itertools.pairwise(measured) if before[0] == m[0] == Phase.OUTPUT]
        assert all(math.isnan(m[2]) for m in answer), "the entropy of an answer is measured, but no rule reads it"


def test_tokens_that_no_rule_reads_are_not_measured(llm: Any, agent: Any, control: Control) -> None:
    """If the rules read signals at sentence ends only, thinking tokens that follow a sentence end have the rank and the
    log-probabilities that they have under other policies. No other token has a signal, and no token an entropy."""
    params, runs = SamplingParams(temperature=1.0, max_tokens=100, seed=7), []
    for policy in (NEUTRAL, SENTENCE_ENDS):
        control.apply(policy)
        with records(agent) as seen:
            tokens = chat(llm, cases(), params)
        runs.append((tokens, [row for of in rows(seen).values() for row in zip(of, [None, *of], strict=False)]))
    (free, everywhere), (governed, at_ends) = runs
    assert governed == free
    compared = 0
    for (full, before), (told, _) in zip(everywhere, at_ends, strict=True):
        assert told[:2] == full[:2]
        assert math.isnan(told[2])
        if before is not None and before[1] & FLAG_SENTENCE and full[3]:
            compared += 1
            assert told[3:] == pytest.approx(full[3:], rel=0, abs=1e-5)
        elif before is not None:
            assert told[3] == 0
            assert np.isnan(told[4:]).all()
    assert compared > 10


def test_in_shadow_a_sample_is_measured_and_in_force_all_are(
    llm: Any, agent: Any, control: Control, settled: Settled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a request of the sample the worker is asked for nothing. A request that runs when a rule comes into force
    is measured from then on."""
    params = SamplingParams(temperature=1.0, max_tokens=30, seed=7, ignore_eos=True)

    def measured(ratio: float) -> tuple[int, int]:
        control.apply({**DENSE, "telemetry": {"shadow_sample_ratio": ratio}})
        before = agent.probing.tokens
        # The control plane keeps pace, so it asks for probes before the measured requests have ended.
        with records(agent) as seen:
            paced(llm, cases() * 4, params, settled)
        signals = [any(row[3] for row in of) for of in rows(seen).values()]
        assert len(signals) == 4 * len(cases())
        assert (agent.probing.tokens > before) == any(signals)
        return sum(signals), len(signals)

    assert measured(0.0)[0] == 0
    assert agent._asked is None
    # The sample comes in clusters, each as large as the number of requests that were live before it.
    choose(monkeypatch, 0.5, {"paced-0": True, "paced-1": False})
    some, of = measured(0.5)
    assert 0 < some < of
    control.apply({**DENSE, "telemetry": {"shadow_sample_ratio": 0.0}})
    run = Run(llm)
    run.add("r", opened(), endless(agent, max_tokens=80))
    with records(agent) as seen:
        run.until(lambda: len(run.tokens["r"]) > 20)
        control.set_policy({"entropy": READS_PROBES})
        wait_for(lambda: agent.link.mailbox.arrived, 20, "the policy to arrive")
        run.until()
    (told,) = rows(seen).values()
    signals = [bool(row[3]) for row in told]
    assert not any(signals[:20])
    begun = signals.index(True)
    # From then on sentences end where they end for a request that is measured from the beginning.
    table, state, expected = agent.tracker.sentences, 0, []
    for token in run.tokens["r"]:
        state = table.step(state, token)
        expected.append(table.flags[state] & ROW_FLAGS)
    flags = [row[1] & ROW_FLAGS for row in told]
    assert flags[begun:] == expected[begun:]
    assert any(flags[begun:])
    assert not any(flags[:20])
    assert control.explain("r").events[0].detail == "signals not measured"


def test_reports_are_rare_until_a_measured_request_thinks(llm: Any, agent: Any, control: Control) -> None:
    """The step in which something is measured again is reported at once."""
    outbox = agent.link.outbox
    control.apply({"telemetry": {"shadow_sample_ratio": 0.0}})
    run = Run(llm)
    run.add("r", opened(), endless(agent, max_tokens=200))
    run.until(lambda: len(run.tokens["r"]) > 5)
    assert max(outbox._wanted()) > USUAL_INTERVAL_STEPS
    with records(agent) as seen:
        control.set_policy({"telemetry": {"shadow_sample_ratio": 1.0}})
        wait_for(lambda: agent.link.mailbox.arrived, 20, "the settings to arrive")
        run.until(lambda: outbox.measures)
    assert [record.urgent for record, *_ in seen] == [False] * (len(seen) - 1) + [True]
    assert outbox._wanted() == (USUAL_INTERVAL_STEPS, USUAL_INTERVAL_STEPS)
    run.until()


@pytest.fixture(params=["rows", "requests"])
def kind(request: pytest.FixtureRequest) -> str:
    """Probes are rows of the probed requests, or requests of their own."""
    if request.param == "requests":
        request.getfixturevalue("probe_requests")
    return str(request.param)


# Rules in force that end no thinking, and read no entropy but that of probes, for which no request waits.
READS_PROBES = {
    **{"shadow": False, "holdout_share": 0.0, "eat_hold_ms": 0},
    **{"rpdi_threshold": 0.0, "eat_level_threshold_nats": 0.0},
}


@pytest.mark.parametrize(("prefix", "rules"), [("is where", {}), ("", READS_PROBES)])
def test_eat_probe(  # noqa: PLR0917
    llm: Any, agent: Any, control: Control, settled: Settled, offline: Any, prefix: str, rules: Any, kind: str
) -> None:
    """A probe returns the entropy after the text that it appends, to 1e-5 nats, also if no rule reads the entropy of
    other tokens. A row costs the tokens of that text, a request one more."""
    control.apply({**DENSE, "entropy": DENSE["entropy"] | rules, "model": {"maze": {"eat_answer_prefix": prefix}}})
    case = {**cases()[0], "template": {"open_think": True}}
    with records(agent) as seen:
        params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
        (tokens,) = paced(llm, [case], params, settled)
    prompt = prompt_ids(llm, case)
    (measured,) = probes(seen).values()
    appended = [agent.tracker.markers.end[0], *llm.get_tokenizer().encode(prefix, add_special_tokens=False)]
    assert measured
    assert len(appended) == 1 + len(prefix.split())
    assert not probe_mismatches(offline, prompt, tokens, measured, appended)
    newest = kind == "requests"
    # The first probe may come before the worker has said that it can compute rows.
    costs = [probe.cost_tokens for probe in measured[1:]]
    assert set(costs) == {newest + len(appended)}, "the newest token of the request has no KV yet"
    assert not any(probe.empty_answer for probe in measured)
    assert len({(len(prompt) + p.think_tokens) % agent.block_size for p in measured}) > 4, (
        "the probes are all at the same place in a block"
    )


def counts(llm: Any) -> dict[str, int]:
    """Return vLLM's own counters that a probe might change."""
    names = ("vllm:prefix_cache_queries", "vllm:prompt_tokens", "vllm:request_success")
    found = dict.fromkeys(names, 0)
    for metric in llm.get_metrics():
        if metric.name in found:
            found[metric.name] += metric.value
    return found


def test_probes_stay_invisible(  # noqa: PLR0917
    llm: Any, agent: Any, control: Control, settled: Settled, stock: list[list[int]], kind: str
) -> None:
    """Probes as often as possible change no token, and none of vLLM's own counts of requests and cached tokens."""
    from tests.engine.test_equality import GREEDY

    control.apply(DENSE)
    before, counted = agent.probing.tokens, counts(llm)
    assert paced(llm, cases(), GREEDY, settled) == stock
    assert agent.probing.tokens > before
    assert not agent.probing.placed
    prompts = sum(len(prompt_ids(llm, case)) for case in cases())
    assert {name: after - counted[name] for name, after in counts(llm).items()} == {
        "vllm:prefix_cache_queries": prompts,
        "vllm:prompt_tokens": prompts,
        "vllm:request_success": len(stock),
    }
