"""KV connectors: none of them ever hears of a probe, and probes cost what they cost without one."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

from meridian_agent.probes import PREFIX
from tests.engine.matrix import connectors, feature
from tests.engine.matrix.asks import Ask
from tests.engine.policies import DENSE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.engine.matrix.engine import Engine

# Calls that say what becomes of one request, each once for each.
OF_ONE = ("on_new_request", "request_finished", "request_finished_all_groups")


def _asks(engine: Engine) -> list[Ask]:
    """Greedy requests that think. vLLM's ExampleConnector breaks at prompts of one token more than full blocks."""
    params = {"temperature": 0.0, "max_tokens": 60 if engine.slow else 250}
    prompts = [engine.prompt(i) for i in range(6)]
    assert all(len(prompt) % engine.agent.block_size != 1 for prompt in prompts), [len(p) for p in prompts]
    return [Ask(prompt, params) for prompt in prompts]


def _told(governed: bool, since: int = 0) -> collections.Counter[str]:
    """What a connector was asked of single requests, by method."""
    return collections.Counter(c["call"] for c in connectors.calls(governed)[since:] if c["call"] in OF_ONE)


def _metrics(engine: Engine) -> dict[str, int]:
    """vLLM's counters of what was looked for in its prefix cache and at the connector."""
    names = ("prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_queries", "request_success")
    found = dict.fromkeys(names, 0)
    for metric in engine.llm.get_metrics():
        if (name := metric.name.removeprefix("vllm:")) in found:
            found[name] += int(metric.value)
    return found


def _check_events(events: Sequence[Any], sequences: Sequence[list[int]]) -> None:
    """Each block that is told stored holds what some request says, and no block is told gone twice."""
    tokens: dict[Any, list[int]] = {}
    for event in events:
        if type(event).__name__ == "BlockStored":
            before = tokens.get(event.parent_block_hash, [])
            for i, block in enumerate(event.block_hashes):
                before = tokens[block] = [*before, *event.token_ids[i * event.block_size : (i + 1) * event.block_size]]
                assert any(sequence[: len(before)] == before for sequence in sequences)
    assert tokens


def _check(engine: Engine) -> None:
    asks = _asks(engine)
    expected = [answer.tokens for (answer,) in engine.stock.ask(asks)]
    engine.control.apply(DENSE)
    before, events = _metrics(engine), list[Any]()
    publisher = engine.scheduler.kv_event_publisher
    publisher.publish = lambda batch: events.extend(batch.events)
    try:
        with engine.watched() as seen:
            runs = engine.paced(asks)
    finally:
        del publisher.publish
    assert runs == expected
    assert sum(len(said.probes) for said in seen) > len(asks)
    for ask, tokens, said in zip(asks, runs, seen, strict=True):
        engine.check_probes(ask.prompt, tokens, said)
    told = connectors.calls(governed=True)
    assert {"SCHEDULER", "WORKER"} <= {call["role"] for call in told}
    naming = {(c["role"], c["call"]) for c in told if any(r.startswith(PREFIX) for r in c["requests"])}
    assert not naming, naming
    # Stock vLLM has answered one request more, at its start.
    assert _told(governed=True) == _told(governed=False) - collections.Counter(_once())
    stored = [len(list((connectors.folder_of(governed) / "stored").glob("*"))) for governed in (True, False)]
    assert stored[0] <= stored[1]
    counted = {name: value - before[name] for name, value in _metrics(engine).items()}
    prompts = sum(len(ask.prompt) for ask in asks)
    assert counted["request_success"] == len(asks)
    assert counted["prefix_cache_queries"] == prompts
    assert counted["external_prefix_cache_queries"] == prompts - counted["prefix_cache_hits"]
    _check_events(events, [[*ask.prompt, *tokens] for ask, tokens in zip(asks, runs, strict=True)])


def _once() -> dict[str, int]:
    return dict.fromkeys(OF_ONE, 1)


@feature("ExampleConnector hears of no probe; their value, and two tokens each", "example", "example-async", "example-v2-async")
def example(engine: Engine) -> None:
    _check(engine)


@feature("NixlConnector: the same", "nixl", "nixl-async")
def nixl(engine: Engine) -> None:
    _check(engine)


@feature("NixlPushConnector: the same", "nixl-push")
def push(engine: Engine) -> None:
    _check(engine)


@feature("MultiConnector of Nixl and Example: the same", "nixl-and-example")
def multi(engine: Engine) -> None:
    _check(engine)
