"""Requests think on engine A and answer on engine B, behind the relay, over NIXL: for the client it is one engine.

Control plane, engines, NIXL and relay are real, and each runs in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_relay.bodies import CarriedRequest
from tests.data import maze
from tests.engine.matrix.features.connectors import REMOTE_DECODE
from tests.engine.pools import POLICY, Pools
from tests.engine.served import Said, ask, client_of
from tests.needed import NIXL
from tests.processes import MODEL, wait_for

if not NIXL.found():
    pytest.skip(NIXL.reason, allow_module_level=True)

PROMPTS = maze.prompts(8, seed=91)


def all_of(port: int, **more: Any) -> list[Said]:
    async def together() -> list[Said]:
        return list(await asyncio.gather(*(ask(port, prompt, **more) for prompt in PROMPTS)))

    return asyncio.run(together())


# Answers that go on to the last token, so that a fault finds them under way. The longest thinking has 379 tokens.
LONG: dict[str, Any] = {"extra_body": {"ignore_eos": True}, "max_tokens": 560}


# Markers that the model writes into answers that go on after their end. A marker that begins an answer is none of them:
# the end of thinking would have got into the answer.
MARKERS = re.compile(r"(?!^)(?:<\|im_end\|>|</think>)")


def words(said: list[Said]) -> list[Said]:
    """Return what was said without markers and spaces, which vLLM does not show in every stream of the same tokens.

    A chat's stream loses the markers of the chunk in which thinking ends, and shows those of later chunks. A chunk has
    several tokens if the server's process had to wait for a core. A completion, by which the relay continues a request,
    has spaces instead of ends of turns.
    """
    return [(one[0], MARKERS.sub("", one[1].replace(" ", "")), *one[2:]) for one in said]


@contextlib.contextmanager
def under_way(port: int, **more: Any) -> Iterator[Future[list[Said]]]:
    """Yield the result of all requests, which are under way."""
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(all_of, port, **more)


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    with Pools(tmp_path_factory.mktemp("pools"), places=len(PROMPTS)) as pools:
        yield pools


@pytest.fixture(scope="module")
def expected(pools: Pools) -> list[Said]:
    """Return what one engine says to each prompt; without the relay no request is handed over."""
    return all_of(pools["A"].port)


@pytest.fixture(scope="module")
def expected_long(pools: Pools) -> list[Said]:
    return words(all_of(pools["A"].port, **LONG))


def results(pools: Pools) -> dict[str, float]:
    """Return the number of requests of the relay by result."""
    found = pools.metrics("relay", "meridian_relay_requests_total{")
    return {key.partition('result="')[2].partition('"')[0]: value for key, value in found.items()}


def more(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0) for name, value in after.items() if value > before.get(name, 0)}


def none_failed(pools: Pools, before: dict[str, float]) -> None:
    """Check that each request since then has one result, and that none has failed."""
    told = more(results(pools), before)
    assert sum(told.values()) == len(PROMPTS)
    assert "failed" not in told


def engine_of(pools: Pools, name: str) -> fleet_pb2.Engine:
    (found,) = (engine for engine in pools.control.engines() if engine.engine_id == name)
    return found


def no_block_is_left(pools: Pools) -> None:
    """Wait until both engines hold no KV block; a thinking engine's are free once they have been read."""
    pools.until(lambda engine: engine.kv_used == 0 and engine.running == 0, "free blocks")


def test_the_client_sees_one_engine(pools: Pools, expected: list[Said]) -> None:
    pools.apply(POLICY)
    before = results(pools)
    assert all_of(pools.relay_port) == expected
    told = more(results(pools), before)
    assert sum(told.values()) == len(PROMPTS)
    assert told["handed_over"] >= len(PROMPTS) / 2
    counted = pools.metrics("control", "meridian_handovers_total{")
    assert sum(value for key, value in counted.items() if 'result="handed_over"' in key) == told["handed_over"], counted


def test_the_answering_engine_may_think_too(pools: Pools, expected: list[Said]) -> None:
    """Engine B serves requests that the relay could continue, as it does in both pools, and keeps none of their
    blocks."""
    asked = CarriedRequest({}, ()).first_body()
    marked = {name: asked[name] for name in ("vllm_xargs", "kv_transfer_params") if name in asked}
    assert marked
    assert all_of(pools["B"].port, extra_body=marked) == expected
    no_block_is_left(pools)


def test_in_shadow_nothing_is_handed_over(pools: Pools, expected: list[Said]) -> None:
    pools.apply({**POLICY, "disagg": {**POLICY["disagg"], "shadow": True}})
    before = results(pools)
    assert all_of(pools.relay_port) == expected
    assert more(results(pools), before) == {"one_engine": len(PROMPTS)}
    no_block_is_left(pools)


def test_answers_that_end_early(pools: Pools, expected: list[Said]) -> None:
    """The budget of tokens counts over both engines."""
    pools.apply(POLICY)
    thinking = max(said[4] for said in expected) - 2
    whole = all_of(pools["A"].port, max_tokens=thinking)
    assert all_of(pools.relay_port, max_tokens=thinking) == whole
    no_block_is_left(pools)


@pytest.mark.parametrize("kind", ["stop", "stop_token_ids"])
def test_stops_end_answers_on_the_other_engine(pools: Pools, expected: list[Said], kind: str) -> None:
    """They sleep on the thinking engine, beside the stop tokens of the handover."""
    pools.apply(POLICY)
    vocabulary = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    shared = [{*said[0].split()} & {*said[1].split()} for said in expected]
    word = next(word for word in expected[0][1].split() if all(word in found for found in shared))
    stops = {"stop": [word]} if kind == "stop" else {"extra_body": {"stop_token_ids": [vocabulary[word]]}}
    whole = all_of(pools["A"].port, **stops)
    assert [said[0] for said in whole] == [said[0] for said in expected]
    for said, free in zip(whole, expected, strict=True):
        assert (said[1].rstrip(), said[2]) == (free[1][: free[1].index(word)].rstrip(), "stop")
    before = results(pools)
    assert all_of(pools.relay_port, **stops) == whole
    assert more(results(pools), before)["handed_over"] >= len(PROMPTS) / 2
    no_block_is_left(pools)


def test_a_frozen_engine_hands_nothing_over(pools: Pools, expected: list[Said]) -> None:
    pools.apply(POLICY)
    pools.control.freeze()
    try:
        pools.until(lambda engine: engine.freeze.confirmed, "the freeze")
        before = results(pools)
        assert all_of(pools.relay_port) == expected
        assert more(results(pools), before) == {"one_engine": len(PROMPTS)}
    finally:
        pools.control.thaw()
    pools.until(lambda engine: not engine.HasField("freeze"), "the thaw")
    no_block_is_left(pools)


def answering(pools: Pools, engine: str, at_least: int = 2) -> None:
    """Wait until some requests answer on an engine."""

    def answers() -> bool:
        found = [r for r in pools.control.requests() if r.engine_id == engine and r.phase == agent_pb2.PHASE_OUTPUT]
        return len(found) >= at_least

    wait_for(answers, 60, f"answers on {engine}")


def test_a_freeze_while_requests_are_handed_over(pools: Pools, expected_long: list[Said]) -> None:
    """Answers that have begun on the other engine go on there; requests that still think answer where they are."""
    pools.apply(POLICY)
    before = results(pools)
    try:
        with under_way(pools.relay_port, **LONG) as said:
            answering(pools, "B", at_least=1)
            pools.control.freeze()
        assert words(said.result()) == expected_long
        none_failed(pools, before)
    finally:
        pools.control.thaw()
    pools.until(lambda engine: not engine.HasField("freeze"), "the thaw")
    no_block_is_left(pools)


def test_the_clients_leave(pools: Pools) -> None:
    """Both engines abort the requests and free the blocks, also those that nobody reads any more."""
    pools.apply(POLICY)
    before = results(pools)

    async def leave() -> None:
        tasks = [asyncio.create_task(ask(pools.relay_port, prompt, **LONG)) for prompt in PROMPTS]
        await asyncio.to_thread(answering, pools, "B", 1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(leave())
    wait_for(lambda: sum(more(results(pools), before).values()) == len(PROMPTS), 30, "a result of each request")
    assert more(results(pools), before)["client_gone"] >= 1
    no_block_is_left(pools)


def test_the_answering_engine_fills_up(pools: Pools, expected_long: list[Said]) -> None:
    """Requests of other clients take every place of the answering engine while requests are on their way to it."""
    pools.apply(POLICY)
    before = results(pools)
    with under_way(pools.relay_port, **LONG) as said:
        wait_for(lambda: engine_of(pools, "A").running > 0, 60, "requests on A")
        assert words(all_of(pools["B"].port, **LONG)) == expected_long
    assert words(said.result()) == expected_long
    none_failed(pools, before)
    no_block_is_left(pools)


def test_the_lease_ends_while_the_answering_engine_stands_still(pools: Pools, expected_long: list[Said]) -> None:
    """The thinking engine gives the blocks to others; the answering engine must not read them, and computes again."""
    pools.apply(POLICY)
    before = results(pools)
    with under_way(pools.relay_port, **LONG) as said:
        answering(pools, "B", at_least=1)
        pools["B"].process.signal(signal.SIGSTOP)
        try:
            wait_for(lambda: engine_of(pools, "A").running == 0, 60, "the end of all requests on A")
            wait_for(lambda: engine_of(pools, "A").kv_used == 0, 60, "the end of the lease")
            # Other requests write over the blocks.
            assert words(all_of(pools["A"].port, **LONG)) == expected_long
        finally:
            pools["B"].process.signal(signal.SIGCONT)
    assert words(said.result()) == expected_long
    none_failed(pools, before)
    no_block_is_left(pools)


class Prefilled:
    """Prompts that B has computed. A has not seen them, so it has to read their KV from B, or to compute them again."""

    def __init__(self, pools: Pools, seed: int) -> None:
        self._pools, self._prompts = pools, maze.prompts(4, seed=seed)
        self._expected = asyncio.run(self._said("B", [{}] * len(self._prompts)))
        kept = asyncio.run(computed(pools["B"].port, self._prompts))
        self._kept = [{"kv_transfer_params": params} for params in kept]

    def decode(self) -> None:
        """Let A generate, and check that it says what B says."""
        assert asyncio.run(self._said("A", self._kept)) == self._expected

    async def _said(self, name: str, more: list[dict[str, Any]]) -> list[Said]:
        port = self._pools[name].port
        asked = [ask(port, prompt, extra_body=body) for prompt, body in zip(self._prompts, more, strict=True)]
        return list(await asyncio.gather(*asked))


def test_the_answering_engine_is_killed_and_comes_back(
    pools: Pools, expected: list[Said], expected_long: list[Said]
) -> None:
    """Answers go on at the thinking engine, and no token is missing or repeated; that engine also computes the prompts
    whose KV it cannot read any more."""
    pools.apply(POLICY)
    prefilled, before = Prefilled(pools, seed=93), results(pools)
    with under_way(pools.relay_port, **LONG) as said:
        answering(pools, "B")
        pools["B"].process.kill()
    assert words(said.result()) == expected_long
    prefilled.decode()
    told = more(results(pools), before)
    assert sum(told.values()) == len(PROMPTS)
    assert told.keys() <= {"one_engine", "handed_over", "recomputed", "finished_on_thinking_engine"}
    pools.start("B")
    pools.wait_for_engines()
    pools.apply(POLICY)
    before = results(pools)
    assert all_of(pools.relay_port) == expected
    assert more(results(pools), before)["handed_over"] >= 1
    no_block_is_left(pools)


def test_a_prefill_and_decode_pair(pools: Pools) -> None:
    pools.apply(POLICY)
    prefilled = Prefilled(pools, seed=92)
    before = read_tokens(pools["A"].port)
    prefilled.decode()
    assert read_tokens(pools["A"].port) > before
    no_block_is_left(pools)


def read_tokens(port: int) -> float:
    """Return the tokens whose KV an engine has read from another one."""
    lines = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30, verify=False).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:external_prefix_cache_hits_total"))


async def computed(port: int, prompts: list[str]) -> list[dict[str, Any]]:
    """Let an engine compute the prompts, and return for each the parameters by which its KV is read from there."""
    async with client_of(port) as client:
        answers = [
            await client.chat.completions.create(
                model="maze",
                messages=[{"role": "user", "content": prompt}],
                temperature=0.0,
                max_tokens=1,
                extra_body={"kv_transfer_params": REMOTE_DECODE},
            )
            for prompt in prompts
        ]
    found = [(answer.model_extra or {})["kv_transfer_params"] for answer in answers]
    assert all(params["do_remote_prefill"] for params in found)
    return found


def test_the_control_plane_is_killed(pools: Pools, expected: list[Said], expected_long: list[Said]) -> None:
    """Requests that were to be handed over answer where they are after the lease; nothing is lost."""
    with under_way(pools.relay_port, **LONG) as said:
        answering(pools, "B", at_least=1)
        pools.control.process.kill()
    assert words(said.result()) == expected_long
    assert all_of(pools.relay_port) == expected
    pools.control.start()
    no_block_is_left(pools)


def test_the_relay_is_killed(pools: Pools, expected: list[Said]) -> None:
    """The clients see the end of their streams; both engines free the blocks."""
    with under_way(pools.relay_port, **LONG) as said:
        answering(pools, "B", at_least=1)
        pools.relay.kill()
        with pytest.raises(openai.APIError):
            said.result()
    pools.start_relay()
    no_block_is_left(pools)
    assert all_of(pools.relay_port) == expected


def test_the_thinking_engine_is_killed(pools: Pools, expected: list[Said], expected_long: list[Said]) -> None:
    """Requests that think or answer there go on at the answering engine."""
    pools.apply(POLICY)
    # The relay knows the answering engine from a handover.
    assert all_of(pools.relay_port) == expected
    before = results(pools)
    with under_way(pools.relay_port, **LONG) as said:
        answering(pools, "B", at_least=1)
        pools["A"].process.kill()
    assert words(said.result()) == expected_long
    assert sum(more(results(pools), before).values()) == len(PROMPTS)
    assert "failed" not in more(results(pools), before)
