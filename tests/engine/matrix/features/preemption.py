"""Preemptions for waiting requests: the output of every request must be stock's, with whatever scheduler and runner."""

from __future__ import annotations

from typing import Any

from meridian.v1 import agent_pb2

from tests.data import maze
from tests.engine import Run
from tests.engine.matrix import feature
from tests.engine.matrix.asks import Ask
from tests.engine.matrix.engine import Engine
from tests.engine.matrix.features.forces import GREEDY
from tests.engine.matrix.features.signals import DRAFTS
from tests.engine.policies import NEUTRAL

RUNNERS = ("v1", "async", "v2", "v2-async")
UNCACHED, WINDOWS = ("uncached", "uncached-v2-async"), ("windows-v1", "windows", "windows-v2", "windows-v2-async")
EXAMPLE = ("example", "example-async", "example-v2", "example-v2-async")
TIGHT = ("tight", "tight-async", "tight-v2", "tight-v2-async")
# A request that people wait for.
URGENT = {"extra_args": {"meridian_tenant": "interactive"}}
# Thinking tokens after which a request may be preempted here.
BEGUN = 6


def policy(**changes: Any) -> dict[str, Any]:
    preemption = {"shadow": False, "preemptible_from_tokens": BEGUN, "recomputed_tokens_per_s": 1_000_000, **changes}
    interactive = {"tenant": "interactive", "preemption": {"may_preempt": True}}
    return {**NEUTRAL, "preemption": preemption, "override": [interactive]}


def thinkers(engine: Engine, count: int, most: int) -> dict[str, Ask]:
    """Return requests that think for all of their `most` tokens, each about a prompt of its own."""
    texts = maze.prompts(count, seed=11)
    params = {**GREEDY, "ignore_eos": True, "max_tokens": most}
    return {f"think{i}": Ask(engine.chat(text), params) for i, text in enumerate(texts)}


def urgent(prompt: list[int]) -> Ask:
    return Ask(prompt, {**GREEDY, "ignore_eos": True, "max_tokens": 6, **URGENT})


def begin(engine: Engine, asks: dict[str, Ask]) -> Run:
    """Run requests until each of them may be preempted, as far as the control plane knows, too."""
    run = engine.run(asks)
    run.until(lambda: all(len(tokens) > BEGUN + 4 for tokens in run.tokens.values()), settled=engine.settled)
    return run


def stocks(engine: Engine, asks: dict[str, Ask]) -> dict[str, list[int]]:
    """Return stock vLLM's tokens of each request."""
    answers = engine.stock.ask(list(asks.values()))
    return {name: answer.tokens for name, (answer,) in zip(asks, answers, strict=True)}


def check_as_stock(engine: Engine, asks: dict[str, Ask], run: Run) -> None:
    assert {name: run.tokens[name] for name in asks} == stocks(engine, asks)


def life_of(engine: Engine, name: str) -> Any:
    """Return what `meridianctl explain` shows of a request that has ended."""
    engine.control.settled()
    return engine.control.explain(name)


def outcomes(engine: Engine, name: str) -> list[tuple[str, int, str]]:
    """Return reason, outcome and its detail for each decision that let a request preempt others."""
    events = [event.decision for event in life_of(engine, name).events if event.kind == "decision"]
    return [(one.reason, one.outcome, one.detail) for one in events if one.kind == "preempt"]


def preempted_for(engine: Engine, name: str) -> list[str]:
    """Return for whom a request was preempted, and at what cost."""
    return [event.detail for event in life_of(engine, name).events if event.kind == "preempted_for"]


@feature("a waiting request preempts the thinking one that loses least: output as stock's", *RUNNERS, *DRAFTS)
@feature("preemption for a waiting request, without a prefix cache: output as stock's", *UNCACHED)
@feature("preemption for a waiting request, with several KV cache groups: output as stock's", *WINDOWS)
@feature("preemption for a waiting request, with ExampleConnector: output as stock's", *EXAMPLE)
def place(engine: Engine) -> None:
    """Thinking has taken all places, and a short prompt arrives, in shadow first."""
    # A step with draft tokens may add several, and all requests must still think when the urgent one arrives.
    places = engine.scheduler.max_num_running_reqs
    most = 120 if engine.scheduler.num_spec_tokens else 24 if engine.slow else 80
    asks = thinkers(engine, places, most)
    named = {**asks, "urgent": urgent(engine.chat(maze.prompts(30, seed=11)[-1]))}
    expected = stocks(engine, named)
    for shadow in (True, False):
        engine.control.apply(policy(shadow=shadow))
        before = engine.agent.preempted_think, engine.agent.preemption.recomputed.total
        run = begin(engine, asks)
        named["urgent"].put(run, "urgent")
        run.until(lambda run=run: bool(run.tokens["urgent"]) or bool(run.finished), settled=engine.settled)
        first = bool(run.tokens["urgent"]) and not run.finished
        run.until()
        engine.drain()
        assert {name: run.tokens[name] for name in named} == expected
        victims = [name for name in asks if preempted_for(engine, name)]
        ((reason, outcome, detail),) = outcomes(engine, "urgent")
        assert reason == "no_place"
        if shadow:
            assert (first, victims, outcome) == (False, [], agent_pb2.OUTCOME_SHADOWED)
            assert detail.startswith("would preempt think")
            assert engine.agent.preempted_think == before[0]
            continue
        assert (first, len(victims), outcome) == (True, 1, agent_pb2.OUTCOME_APPLIED), (first, victims, detail)
        assert engine.agent.preempted_think == before[0] + 1
        ((told),) = preempted_for(engine, victims[0])
        assert told.startswith("request urgent")
        assert " of tenant interactive: " in told
        assert detail.startswith(f"preempted {victims[0]}")
        cost, whole = int(told.split()[-5]), len(named[victims[0]].prompt) + most
        recomputed = engine.agent.preemption.recomputed.total - before[1]
        cached = engine.scheduler.kv_cache_manager.enable_caching
        assert 0 <= cost < engine.scheduler.block_size or not cached
        assert 0 < recomputed < whole or cached


@feature("no request is preempted for others more often than the policy says", "v1", "async")
def often(engine: Engine) -> None:
    """More waiting requests come than there are requests that may be preempted once: two at once, which preempt in one
    step, and then one after another."""
    places = engine.scheduler.max_num_running_reqs
    engine.control.apply(policy(max_preemptions=1))
    asks = thinkers(engine, places, 150)
    run = begin(engine, asks)
    texts = maze.prompts(40, seed=11)[20 : 20 + places + 2]
    named = {f"urgent{i}": urgent(engine.chat(text)) for i, text in enumerate(texts)}
    names = list(named)
    for together in (names[:2], *([name] for name in names[2:])):
        for name in together:
            named[name].put(run, name)
        run.until(lambda together=together: run.finished.keys() >= {*together}, settled=engine.settled)
    run.until()
    engine.drain()
    check_as_stock(engine, {**asks, **named}, run)
    # Neither of the two has to preempt again because the other one's victim has taken its place.
    made = [outcomes(engine, name) for name in names[:2]]
    assert [len(each) for each in made] == [1, 1], made
    times = [len(preempted_for(engine, name)) for name in asks]
    assert max(times) == 1, times
    assert sum(times) >= places // 2, times


@feature("preemption for a waiting request where thinking has taken all KV blocks: output as stock's", *TIGHT)
def blocks(engine: Engine) -> None:
    engine.control.apply(policy())
    asks = thinkers(engine, 3, 90)
    run = begin(engine, asks)
    pool = engine.scheduler.kv_cache_manager.block_pool
    words = [engine.token(word) for word in ("walk", "is", "where")]
    named = {**asks, "urgent": urgent([*words * 38, *engine.opening])}
    run.until(lambda: pool.get_num_free_blocks() * 32 < len(named["urgent"].prompt), settled=engine.settled)
    assert not run.finished
    named["urgent"].put(run, "urgent")
    run.until(lambda: bool(run.tokens["urgent"]) or bool(run.finished), settled=engine.settled)
    assert not run.finished
    run.until()
    engine.drain()
    check_as_stock(engine, named, run)
    # vLLM may first take the request in, and preempt it at once because thinking takes the last blocks.
    made = outcomes(engine, "urgent")
    assert ("no_kv_blocks", agent_pb2.OUTCOME_APPLIED) in [one[:2] for one in made], made
    assert any(preempted_for(engine, name) for name in asks)
