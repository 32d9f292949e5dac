"""The agent's signals of tokens: phases, entropy, the end marker's rank, EAT."""

from __future__ import annotations

from typing import Any

import numpy as np

from meridian_agent.core.phases import Phase
from tests.engine import cases
from tests.engine.matrix import feature
from tests.engine.matrix.asks import Ask
from tests.engine.matrix.engine import CLOSED, Engine
from tests.engine.offline import entropy
from tests.engine.policies import DENSE

VOCABULARIES = ("qwen3-vocabulary", "gptoss-vocabulary")
ALL = ("v1", "async", "v2", "v2-async", *VOCABULARIES)
DRAFTS = ("ngram", "v2-ngram", "v2-async-ngram")
EVERYWHERE = (*ALL, *DRAFTS)
RANKS = ("tp2", "tp2-v2-async")


def _as_stock(engine: Engine, **params: Any) -> None:
    """Check that prompts that open thinking, leave it to the model or close it have stock's output and right
    signals."""
    # The first three cases have a template each.
    templates = [case["template"] for case in cases()[: 3 if engine.slow else 5]]
    seeds = [{"seed": i} if params["temperature"] else {} for i in range(len(templates))]
    asks = [Ask(engine.prompt(i, template), {**params, **seeds[i]}) for i, template in enumerate(templates)]
    expected = engine.stock.draw(asks) if params["temperature"] else engine.stock.ask(asks)
    answers, seen = engine.observe(asks)
    assert answers == expected
    assert len(seen) == len(asks)
    for ask, template, (answer,), said in zip(asks, templates, answers, seen, strict=True):
        engine.check_phases(ask.prompt, answer.tokens, said, template == CLOSED)
        engine.check_signals(ask.prompt, answer.tokens, said)


@feature("greedy: tokens as stock's; phases, entropy and rank of each", *EVERYWHERE, *RANKS)
def greedy(engine: Engine) -> None:
    _as_stock(engine, temperature=0.0, max_tokens=24 if engine.slow else 250)


@feature("sampled with a seed: the same", *EVERYWHERE)
def sampled(engine: Engine) -> None:
    _as_stock(engine, temperature=1.0, max_tokens=16 if engine.slow else 200)


@feature("log-probabilities as stock's, entropy that of all of them", *EVERYWHERE)
def logprobs(engine: Engine) -> None:
    most = 4 if engine.words else 20 if engine.slow else 80
    params = {"temperature": 0.0, "max_tokens": most, "logprobs": -1}
    asks = [Ask(engine.prompt(i), params) for i in range(2)]
    answers, seen = engine.observe(asks)
    for (answer,), (stock,), said in zip(answers, engine.stock.ask(asks), seen, strict=True):
        assert answer.tokens == stock.tokens
        vocabulary = engine.llm.llm_engine.model_config.get_vocab_size()
        found, expected = (one.all_logprobs(vocabulary) for one in (answer, stock))
        assert np.abs(np.exp(found) - np.exp(expected)).max() <= 1e-5
        for (phase, _, entropy_nats, rank, logprob, margin), row in zip(said.rows, expected, strict=True):
            assert phase == Phase.THINK
            assert abs(entropy_nats - entropy(row)) <= 1e-5
            assert rank == 1 + int((row > row[engine.end]).sum())
            assert abs(logprob - row[engine.end]) <= 5e-5
            assert abs(margin - (row.max() - row[engine.end])) <= 1e-5


@feature("EAT probes: their value and cost", *EVERYWHERE, *RANKS)
def eat(engine: Engine) -> None:
    engine.control.apply(DENSE)
    params = {"temperature": 0.0, "max_tokens": 32 if engine.slow else 120}
    asks = [Ask(engine.prompt(i), params) for i in range(2 if engine.slow else 6)]
    with engine.watched() as seen, engine.looked_up() as looked_up:
        runs = engine.paced(asks)
    assert runs == [answer.tokens for (answer,) in engine.stock.ask(asks)]
    assert any(said.probes for said in seen)
    assert looked_up == [sum(len(ask.prompt) for ask in asks)], "probes are hidden from vLLM's metrics"
    for ask, tokens, said in zip(asks, runs, seen, strict=True):
        engine.check_probes(ask.prompt, tokens, said)
    if engine.build.asynchronous:
        _hidden_between_steps(engine, asks[0])


def _hidden_between_steps(engine: Engine, ask: Ask) -> None:
    """Check that a probe which is under way between two steps counts as no running request, and that vLLM can reset its
    prefix cache once its only request has ended."""
    run, placed = engine.run({"r": ask}), engine.agent.probing.placed
    run.until(lambda: any(probe.cost_tokens for probe in placed.values()), settled=engine.settled)
    running = [metric.value for metric in engine.llm.get_metrics() if metric.name == "vllm:num_requests_running"]
    told = engine.agent.link.outbox.gauges().running
    assert (running, told) == ([1.0], 1)
    engine.llm.llm_engine.abort_request(["r"])
    assert placed
    assert engine.scheduler.reset_prefix_cache()
    engine.drain()
