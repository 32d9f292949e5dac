"""Requests that think on the governed engine and answer on the stock engine, which reads their KV over NIXL."""

from __future__ import annotations

import json
from typing import Any

from meridian.v1 import agent_pb2

from meridian_agent.core.request_info import CANDIDATE
from meridian_agent.vllm_adapter.hand_over import SIGN
from tests.data import maze
from tests.engine import Run
from tests.engine.matrix import feature
from tests.engine.matrix.asks import Ask
from tests.engine.matrix.engine import Engine
from tests.engine.matrix.features.connectors import NIXL

URL = "http://b:8000"
# Most tokens of a request that ends its thinking by itself.
MOST = 700
# Tokens of a request before the decision about it arrives.
EARLY = 8


def _candidate(engine: Engine, text: str, cap: int | None = None, **params: Any) -> Ask:
    """Return a greedy request that a relay could continue. cap: the request's own cap in thinking tokens."""
    extra: dict[str, Any] = {CANDIDATE: 1}
    if cap is not None:
        extra["meridian_max_think_tokens"] = cap
    return Ask(engine.chat(text), {"temperature": 0.0, "max_tokens": 250, **params, "extra_args": extra})


def _decide(engine: Engine, url: str = URL) -> None:
    """Decide to hand all live requests over; an empty URL takes that back. The decisions have no id, so the control
    plane does not hear of them."""
    tracker = engine.agent.tracker
    decided = [agent_pb2.HandOver(slot=slot, url=url, ref=f"ref-{slot}" if url else "") for slot in tracker.by_slot]
    engine.agent.directives.accept(agent_pb2.Directives(step=1 << 40, hand_overs=decided))


def _thinking(engine: Engine, asks: dict[str, Ask]) -> Run:
    """Return the requests once each of them has a few tokens."""
    run = engine.run(asks)
    run.until(lambda: all(len(tokens) >= EARLY for tokens in run.tokens.values()))
    return run


def _told(run: Run, name: str) -> dict[str, Any]:
    """Return what the engine tells the relay about a request that was handed over."""
    assert run.finished[name] == "stop", (name, run.finished, len(run.tokens[name]))
    reason = run.stopped[name]
    assert isinstance(reason, str)
    assert reason.startswith(SIGN), reason
    told: dict[str, Any] = json.loads(reason.removeprefix(SIGN))
    return told


@feature("thinking is handed over: the other engine's answer is this engine's own, at any edge of a block", *NIXL)
def handed_over(engine: Engine) -> None:
    """One request ends its thinking by itself; the others are ended one token before, at and after a block's edge."""
    natural, *others = maze.prompts(4, seed=79)
    block = engine.agent.block_size
    asks = {"natural": _candidate(engine, natural, max_tokens=MOST)}
    for past, prompt in zip((-1, 0, 1), others, strict=True):
        # The marker is the last of the tokens, so all tokens before it have KV.
        cap = (past - len(engine.chat(prompt))) % block
        cap += 0 if cap > 2 * EARLY else block
        asks[f"edge{past}"] = _candidate(engine, prompt, cap, **engine.endless(max_tokens=250))
    run = _thinking(engine, asks)
    _decide(engine)
    run.until()
    reading = []
    for name, ask in asks.items():
        told, tokens = _told(run, name), run.tokens[name]
        assert (told["url"], tokens.count(engine.end), tokens[-1]) == (URL, 1, engine.end)
        (blocks,) = told["kv_transfer_params"]["remote_block_ids"]
        known = [*ask.prompt, *tokens]
        assert len(blocks) == -(-len(known) // block)
        if name.startswith("edge"):
            assert (len(known) - 1) % block == int(name.removeprefix("edge")) % block
        extra = {"kv_transfer_params": told["kv_transfer_params"]}
        reading.append(Ask(known, {"temperature": 0.0, "max_tokens": MOST - len(tokens), "extra_args": extra}))
    answers = [answer.tokens for (answer,) in engine.stock.ask(reading)]
    params = [{"temperature": 0.0, "max_tokens": ask.params["max_tokens"]} for ask in reading]
    own = engine.tokens([Ask(ask.prompt, told) for ask, told in zip(reading, params, strict=True)])
    assert answers == own
    whole = engine.stock.ask([Ask(asks["natural"].prompt, {"temperature": 0.0, "max_tokens": MOST})])
    assert run.tokens["natural"] + answers[0] == whole[0][0].tokens
    engine.drain()


@feature("a request whose handover is taken back, or which ends before its marker, keeps no blocks", *NIXL)
def taken_back(engine: Engine) -> None:
    prompts = maze.prompts(3, seed=80)
    run = _thinking(engine, {"back": _candidate(engine, prompts[0])})
    _decide(engine)
    run.step()
    _decide(engine, url="")
    run.until()
    plain = {"temperature": 0.0, "max_tokens": 250}
    (expected,) = engine.stock.ask([Ask(engine.chat(prompts[0]), plain)])
    assert run.tokens["back"] == expected[0].tokens
    assert not isinstance(run.stopped["back"], str)
    ends = {"length": _candidate(engine, prompts[1], max_tokens=EARLY + 4), "abort": _candidate(engine, prompts[2])}
    run = _thinking(engine, ends)
    _decide(engine)
    run.step()
    run.abort("abort")
    run.until()
    assert run.finished == {"length": "length", "abort": "abort"}
    # vLLM forgets a request with its blocks; kept blocks would last until the end of the lease.
    run.step()
    assert not engine.scheduler.requests
    assert engine.scheduler.kv_cache_manager.usage == 0
