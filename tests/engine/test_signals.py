"""Signals measured in the engine, compared with an independent computation by Transformers on the same tokens."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
from vllm import SamplingParams

from meridian_agent.core.phases import FLAG_END, Phase
from tests.engine import cases, chat, paced, prompt_ids
from tests.engine.offline import load, mismatches, probe_mismatches
from tests.engine.policies import DENSE
from tests.engine.recording import probes, records, rows

if TYPE_CHECKING:
    from tests.engine.pacing import Settled
    from tests.processes import Control


@pytest.fixture(scope="module")
def offline() -> Any:
    return load()


def test_token_signals(llm: Any, agent: Any, offline: Any) -> None:
    """In a mixed batch at temperature 1, entropy and the end marker's margin match to 1e-5 nats, the rank exactly, and
    the end marker's log-probability to 5e-5."""
    chosen = cases()
    with records(agent) as seen:
        generated = chat(llm, chosen, SamplingParams(temperature=1.0, max_tokens=120, seed=7))
    (start,), (end,) = agent.tracker.markers.starts[0], agent.tracker.markers.ends[0]
    by_request = rows(seen)
    assert len(by_request) == len(chosen)
    for case, tokens, measured in zip(chosen, generated, by_request.values(), strict=True):
        prompt = prompt_ids(llm, case)
        assert not mismatches(offline, prompt, tokens, measured, end)
        logprobs = offline(prompt + tokens, everywhere=True)[len(prompt) - 1 : -1]
        expected = logprobs[:, end]
        # The tolerance is for a single logit: two implementations round float32 differently.
        # A start marker that the model writes itself is not measured, because the request does not think before it.
        thinking = [i for i, m in enumerate(measured) if m[0] == Phase.THINK and tokens[i] != start]
        assert [measured[i][4] for i in thinking] == pytest.approx(expected[thinking], abs=5e-5)
        own = [m for token, m in zip(tokens, measured, strict=True) if token == start]
        assert all(math.isnan(m[2]) for m in own)
        margins = (logprobs.max(axis=1) - expected)[thinking]
        assert [measured[i][5] for i in thinking] == pytest.approx(margins, rel=0, abs=1e-5)
        answer = [m for before, m in itertools.pairwise(measured) if before[0] == m[0] == Phase.OUTPUT]
        assert all(math.isnan(m[2]) for m in answer), "the entropy of an answer is measured, but no rule reads it"


def test_phases_follow_the_text(llm: Any, agent: Any) -> None:
    """Every token's phase is that of its place before or after the markers."""
    chosen = cases()
    with records(agent) as seen:
        generated = chat(llm, chosen, SamplingParams(temperature=1.0, max_tokens=300, seed=3))
    (start,), (end,) = agent.tracker.markers.starts[0], agent.tracker.markers.ends[0]
    for case, tokens, measured in zip(chosen, generated, rows(seen).values(), strict=True):
        thinking = bool(case["template"].get("open_think"))
        for token, (phase, flags, *_) in zip(tokens, measured, strict=True):
            thinking = thinking or token == start
            assert phase == (Phase.THINK if thinking else Phase.OUTPUT)
            if token == end and thinking:
                assert flags & FLAG_END
                thinking = False


@pytest.fixture(params=["rows", "requests"])
def kind(request: pytest.FixtureRequest) -> str:
    """Probes are rows of the probed requests, or requests of their own."""
    if request.param == "requests":
        request.getfixturevalue("probe_requests")
    return str(request.param)


@pytest.mark.parametrize("prefix", ["", "is where"])
def test_eat_probe(  # noqa: PLR0917
    llm: Any, agent: Any, control: Control, settled: Settled, offline: Any, prefix: str, kind: str
) -> None:
    """A probe returns the entropy after the text that it appends, to 1e-5 nats. A row costs the tokens of that text, a
    request one more."""
    control.apply({**DENSE, "model": {"maze": {"eat_answer_prefix": prefix}}})
    case = {**cases()[0], "template": {"open_think": True}}
    with records(agent) as seen:
        params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
        (tokens,) = paced(llm, [case], params, settled)
    prompt = prompt_ids(llm, case)
    (measured,) = probes(seen).values()
    appended = [agent.tracker.markers.end[0], *llm.get_tokenizer().encode(prefix, add_special_tokens=False)]
    assert measured
    assert len(appended) == 1 + len(prefix.split())
    assert not probe_mismatches(offline, prompt, tokens, measured, appended)
    newest = kind == "requests"
    # The first probe may come before the worker has said that it can compute rows.
    costs = [cost for *_, cost, _, _ in measured[1:]]
    assert set(costs) == {newest + len(appended)}, "the newest token of the request has no KV yet"
    assert not any(empty for *_, empty in measured)
    assert len({(len(prompt) + p[2]) % agent.block_size for p in measured}) > 4, (
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
