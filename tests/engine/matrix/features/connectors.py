"""KV connectors: no connector is ever told of a probe, and probes cost the same as without a connector."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from meridian_agent.core.request_info import is_probe
from tests.data import maze
from tests.engine import STRIPPED, stops_next
from tests.engine.matrix import connectors, feature
from tests.engine.matrix.asks import Ask
from tests.engine.matrix.engine import CLOSED, Engine
from tests.engine.matrix.stock import Stock
from tests.engine.policies import CONVERGED, DENSE, NEUTRAL
from tests.engine.recording import records
from tests.processes import wait_for

EXAMPLE = ("example", "example-async", "example-v2", "example-v2-async")
NIXL = ("nixl", "nixl-async")
# Calls that report the course of a single request, each made once for each request.
OF_ONE = ("on_new_request", "request_finished", "request_finished_all_groups")


def _asks(engine: Engine) -> list[Ask]:
    """Return greedy requests that think. vLLM's ExampleConnector fails on prompts of full blocks plus one token."""
    params = {"temperature": 0.0, "max_tokens": 60 if engine.slow else 120}
    prompts = [engine.prompt(i) for i in range(6)]
    assert all(len(prompt) % engine.agent.block_size != 1 for prompt in prompts), [len(p) for p in prompts]
    return [Ask(prompt, params) for prompt in prompts]


def _told(governed: bool) -> collections.Counter[str]:
    """Return how often a connector was told of a single request, by method."""
    return collections.Counter(c["call"] for c in connectors.calls(governed) if c["call"] in OF_ONE)


def _metrics(engine: Engine) -> dict[str, int]:
    """Return vLLM's counters of the tokens looked up in its prefix cache and at the connector."""
    cached = ("prefix_cache_queries", "prefix_cache_hits")
    found = dict.fromkeys((*cached, *(f"external_{name}" for name in cached), "request_success", "num_preemptions"), 0)
    for metric in engine.llm.get_metrics():
        if (name := metric.name.removeprefix("vllm:")) in found:
            found[name] += int(metric.value)
    return found


def _check_events(events: Sequence[Any], sequences: Sequence[list[int]]) -> None:
    """Check that each block reported as stored holds tokens of some request."""
    tokens: dict[Any, list[int]] = {}
    for event in events:
        if type(event).__name__ == "BlockStored":
            before = tokens.get(event.parent_block_hash, [])
            for i, block in enumerate(event.block_hashes):
                before = tokens[block] = [*before, *event.token_ids[i * event.block_size : (i + 1) * event.block_size]]
                assert any(sequence[: len(before)] == before for sequence in sequences)
    assert tokens


def _check_unnamed(engine: Engine, told: list[dict[str, Any]]) -> None:
    """Check that the connector was called on both sides and that no call names a probe.

    The exception is the call with which Model Runner V2 hands over the whole batch that it is about to compute.
    """
    assert {"SCHEDULER", "WORKER"} <= {call["role"] for call in told}
    naming = {(c["role"], c["call"]) for c in told if any(is_probe(r) for r in c["requests"])}
    assert naming <= ({("WORKER", "start_load_kv")} if engine.build.v2 else set()), naming


def _check(engine: Engine) -> None:
    transfer, shown = engine.build.args["kv_transfer_config"], engine.control.engine()
    assert (shown.kv_connector, shown.kv_role) == (transfer["kv_connector"], transfer["kv_role"])
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
    _check_unnamed(engine, connectors.calls(governed=True))
    # Stock vLLM has answered one more request, at its start; a MultiConnector tells each of its connectors of it.
    told, more = _told(governed=True), _told(governed=False)
    assert {call: n * (len(asks) + 1) for call, n in told.items()} == {call: n * len(asks) for call, n in more.items()}
    stored = [len(list((connectors.folder_of(governed) / "stored").glob("*"))) for governed in (True, False)]
    assert stored[0] <= stored[1]
    counted = {name: value - before[name] for name, value in _metrics(engine).items()}
    prompts = sum(len(ask.prompt) for ask in asks)
    assert counted["request_success"] == len(asks)
    assert counted["prefix_cache_queries"] == prompts
    assert counted["external_prefix_cache_queries"] == prompts - counted["prefix_cache_hits"]
    _check_events(events, [[*ask.prompt, *tokens] for ask, tokens in zip(asks, runs, strict=True)])


REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# Steps in which nothing is computed, of which one or two reports are allowed.
EMPTY_STEPS = 300


@feature("ExampleConnector hears of no probe; their value and cost", *EXAMPLE)
def example(engine: Engine) -> None:
    _check(engine)


@feature("NixlConnector: the same", *NIXL)
def nixl(engine: Engine) -> None:
    _check(engine)


@feature("NixlPushConnector: the same", "nixl-push")
def push(engine: Engine) -> None:
    _check(engine)


@feature("MultiConnector of Nixl and Example: the same", "nixl-and-example")
def multi(engine: Engine) -> None:
    _check(engine)


@feature("KV that another engine has computed, by NixlConnector: the same", *NIXL)
def read(engine: Engine) -> None:
    """Prompts that no cache has are computed by the stock engine, and the governed engine reads their KV from it."""
    params = {"temperature": 0.0, "max_tokens": 250}
    asks = [Ask(engine.chat(prompt), params) for prompt in maze.prompts(4, seed=77)]
    kept = _computed_by(engine.stock, asks)
    engine.control.apply(DENSE)
    since, before = len(connectors.calls(governed=True)), _metrics(engine)
    with engine.watched() as seen:
        runs = engine.paced(_reading(asks, kept))
    assert _metrics(engine)["external_prefix_cache_hits"] > before["external_prefix_cache_hits"]
    assert runs == [answer.tokens for (answer,) in engine.stock.ask(asks)]
    for ask, tokens, said in zip(asks, runs, seen, strict=True):
        assert said.probes
        engine.check_probes(ask.prompt, tokens, said)
    _check_unnamed(engine, connectors.calls(governed=True)[since:])


@feature("on KV that another engine has computed: caps exact, rules, KV pressure, aborts that leave nothing", *NIXL)
def decoded(engine: Engine) -> None:
    """The governed engine is the decode engine of a pair, and the stock engine computes the prompts."""
    greedy = {"temperature": 0.0, "max_tokens": 250}
    # An engine with every place taken refuses probes.
    asks = [Ask(engine.chat(prompt), greedy) for prompt in maze.prompts(6, seed=82)]
    free = [answer.tokens for (answer,) in engine.stock.ask(asks)]

    def reading(params: Sequence[dict[str, Any]]) -> list[Ask]:
        engine.llm.llm_engine.reset_prefix_cache()
        wanted = [Ask(ask.prompt, each) for ask, each in zip(asks, params, strict=True)]
        return _reading(wanted, _computed_by(engine.stock, wanted))

    before = _metrics(engine)
    caps = [7 + 5 * i for i in range(len(asks))]
    own = [{**greedy, "extra_args": {"meridian_max_think_tokens": cap}} for cap in caps]
    for tokens, capped, cap in zip(free, engine.tokens(reading(own)), caps, strict=True):
        engine.check_ends_once(tokens, capped, cap)
    engine.control.apply({"scheduler": {"max_think_tokens": 40}, "entropy": {"enabled": False}})
    for tokens, capped in zip(free, engine.tokens(reading([greedy] * len(asks))), strict=True):
        engine.check_ends_once(tokens, capped, 40)
    engine.control.apply(CONVERGED)
    sooner = 0
    for tokens, ended in zip(free, engine.paced(reading([greedy] * len(asks))), strict=True):
        at = ended.index(engine.end) if engine.end in ended else len(ended)
        assert tokens[:at] == ended[:at]
        sooner += tokens[: at + 1] != ended[: at + 1]
    assert sooner >= len(asks) / 2
    engine.control.apply(DENSE)
    long = engine.endless(max_tokens=350)
    assert engine.tokens(reading([long] * len(asks))) == [
        answer.tokens for (answer,) in engine.stock.ask([Ask(ask.prompt, long) for ask in asks])
    ]
    found = _metrics(engine)
    # Four times the KV of all prompts was read, but for the last block of each.
    read_tokens = found["external_prefix_cache_hits"] - before["external_prefix_cache_hits"]
    assert read_tokens > 2 * sum(len(ask.prompt) for ask in asks)
    assert found["num_preemptions"] > before["num_preemptions"]
    run = engine.run({f"leaves{i}": ask for i, ask in enumerate(reading([long] * len(asks)))})
    # Some requests wait for their KV and others think when the clients leave.
    run.until(lambda: any(run.tokens.values()))
    for name in list(run.tokens):
        run.abort(name)
    engine.drain()
    assert engine.scheduler.kv_cache_manager.usage == 0


@feature("requests that another engine continues count neither as unended nor as empty answers", *NIXL)
def continued(engine: Engine) -> None:
    """The governed engine computes prompts, and the stock engine reads their KV from it and answers."""
    params = {"temperature": 0.0, "max_tokens": 60}
    asks = [Ask(engine.chat(prompt), params) for prompt in maze.prompts(4, seed=78)]
    # The first report of a stream is a snapshot, which leaves out requests that have ended.
    engine.tokens([Ask(engine.prompt(), params)])
    before = engine.control.settled()
    kept = _computed_by(engine, asks)
    assert engine.scheduler.requests, "vLLM keeps the blocks until they are read"
    answers = engine.stock.ask(_reading(asks, kept))
    engine.drain()
    wait_for(lambda: engine.control.engine().token_events >= before.token_events + len(asks), 20, "the reports")
    after = engine.control.settled()
    assert after.answers == before.answers
    assert after.open_decisions == 0
    assert not engine.agent.tracker.unfreed
    assert [a.tokens for (a,) in answers] == engine.tokens(asks)


@feature("steps of nothing, while blocks wait to be read, are not reported", *EXAMPLE)
def empty(engine: Engine) -> None:
    held = Ask(engine.prompt(), {"temperature": 0.0, "max_tokens": 5})
    # A tier would have an outcome in the step that frees the blocks, so that this step would be reported.
    engine.control.apply({**NEUTRAL, "kv_memory": {"enabled": False}})
    with records(engine.agent) as sent:
        run = engine.run({connectors.HELD: held})
        run.until()
        at_end = len(sent)
        assert engine.scheduler.requests
        for _ in range(EMPTY_STEPS):
            engine.llm.llm_engine.step()
        assert engine.scheduler.requests
        waiting = sent[at_end:]
        _read(engine)
        assert sent[-1][0].gauges.kv_used == engine.scheduler.kv_cache_manager.usage == 0
        # The engine's numbers are those that an earlier step of nothing has said, but not those said last.
        engine.run({connectors.HELD: held}).until()
        _read(engine)
    assert len(waiting) <= 2, f"{len(waiting)} reports of {EMPTY_STEPS} steps"
    assert engine.scheduler.kv_cache_manager.usage == 0
    assert engine.control.settled().kv_used == 0


@feature("blocks that a connector keeps after a request's end are given up once it lets go", *EXAMPLE)
def kept(engine: Engine) -> None:
    engine.llm.llm_engine.reset_prefix_cache()
    pool = engine.scheduler.kv_cache_manager.block_pool.blocks
    block, prompt = engine.agent.block_size, engine.prompt()
    before = engine.agent.blocks.reclaimed
    run = engine.run({connectors.HELD: Ask(prompt, engine.endless(max_tokens=4 * block, extra_args=STRIPPED))})
    run.until(lambda: len(run.tokens[connectors.HELD]) == 3 * block, settled=engine.settled)
    (name,) = engine.agent.tracker.by_id
    run.until(lambda: len(run.tokens[connectors.HELD]) == 4 * block - 1, settled=engine.settled)
    stops_next(engine.scheduler, name)
    run.until(settled=engine.settled)
    assert name in engine.agent.tracker.unfreed
    (held,) = engine.scheduler.kv_cache_manager.get_block_ids(name)
    full = held[: (len(prompt) + 4 * block - 1) // block]
    assert all(pool[b].block_hash is not None for b in full), "the next turn may still begin on them"
    _read(engine)
    assert [pool[b].block_hash is not None for b in full] == [i < len(prompt) // block for i in range(len(full))]
    assert engine.agent.blocks.reclaimed - before == len(full) - len(prompt) // block > 0
    assert not engine.agent.tracker.unfreed


def _computed_by(first: Engine | Stock, asks: list[Ask]) -> list[dict[str, Any]]:
    """Let an engine compute the prompts, and return for each the parameters by which its KV is read from there."""
    one = {"temperature": 0.0, "max_tokens": 1, "extra_args": {"kv_transfer_params": REMOTE_DECODE}}
    kept = [answer.kv or {} for (answer,) in first.ask([Ask(ask.prompt, one) for ask in asks])]
    assert all(kept)
    return kept


def _reading(asks: list[Ask], kept: list[dict[str, Any]]) -> list[Ask]:
    """Return the requests with the parameters by which their KV is read from the engine that computed it."""
    extra = [{**ask.params.get("extra_args", {}), "kv_transfer_params": kv} for ask, kv in zip(asks, kept, strict=True)]
    return [Ask(ask.prompt, {**ask.params, "extra_args": each}) for ask, each in zip(asks, extra, strict=True)]


def _read(engine: Engine) -> None:
    """Let the connector free the blocks that it keeps, and step until vLLM has freed them."""
    path = connectors.folder_of(governed=True) / connectors.READ
    path.touch()
    engine.drain()
    path.unlink()


@feature("blocks that a connector fails to load are computed again in vLLM's own order", "example")
def failed_loads(engine: Engine) -> None:
    """Of the requests that share such a block the first one computes it, so no other may run before it. Stock vLLM
    itself fails here under asynchronous scheduling."""
    shared, sampling = engine.prompt(5, CLOSED) * 2, {"temperature": 0.0, "max_tokens": 40}
    ends = [engine.prompt(0), engine.prompt(1), engine.prompt(2, {}), engine.prompt(3, CLOSED)]
    asks = {f"r{i}": Ask([*shared, *end], sampling) for i, end in enumerate(ends)}
    thinking = {f"thinks{i}": Ask(engine.prompt(i), engine.endless(max_tokens=30)) for i in range(2)}
    # The connector stores the KV of these prompts.
    expected = [engine.tokens([ask])[0] for ask in asks.values()]
    engine.tokens([*thinking.values()])
    engine.drain()
    assert engine.scheduler.reset_prefix_cache()
    engine.llm.collective_rpc(fail_to_load)
    run = engine.run(thinking)
    run.until(lambda: all(len(run.tokens[name]) > 3 for name in thinking))
    for name, ask in asks.items():
        ask.put(run, name)
    run.until(settled=engine.settled)
    engine.drain()
    ((failed),) = engine.llm.collective_rpc(load_again)
    assert failed == len(asks) + len(thinking)
    assert [run.tokens[name] for name in asks] == expected


def fail_to_load(worker: Any) -> None:
    """Let a worker's ExampleConnector load nothing, and report the blocks."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector, blocks = get_kv_transfer_group(), list[set[int]]()
    worker.meridian_failed = 0

    def start(context: Any) -> None:
        loads = [r for r in connector._get_connector_metadata().requests if not r.is_store and context.attn_metadata]
        blocks.extend({*(r.slot_mapping // connector._block_size).tolist()} for r in loads)
        worker.meridian_failed += len(loads)

    def errors() -> set[int]:
        reported = set[int]().union(*blocks)
        blocks.clear()
        return reported

    connector.start_load_kv, connector.get_block_ids_with_load_errors = start, errors


def load_again(worker: Any) -> int:
    """Undo `fail_to_load`, and return for how many requests nothing was loaded."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    del connector.start_load_kv, connector.get_block_ids_with_load_errors
    failed: int = worker.meridian_failed
    return failed
