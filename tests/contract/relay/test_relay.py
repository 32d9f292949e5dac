"""The legs of a request one by one: bodies, limits, faults, clients that leave, and requests that pass as they are."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from meridian_relay import engines as engines_module
from meridian_relay import listener as listener_module
from meridian_relay.engines import EngineFailed, Engines, _events
from meridian_relay.replies import StreamedReply
from tests.contract.relay.relayed import BODY, LONG_S, PARAMS, Relayed, ask, engines, handover, relaying
from tests.fakes.vllm_server import CONTEXT, CORS, END, PROMPT, FakeVllm, Plan, Script
from tests.processes import free_port

SCRIPT = Script(
    [b"so ", b"think ", b"more"], [b"\n\n", b"an", b"swer ", b"is ", "é".encode()[:1], "é".encode()[1:], b"!"]
)
THOUGHT, ANSWER = "so think more", "\n\nanswer is é!"
KNOWN = 4  # the thinking and its end marker
CHAT = "/v1/chat/completions"


async def handed(home: FakeVllm, url: str, **instruction: Any) -> None:
    home.usual = Plan(handover=handover(url, **instruction))


def whole(answer: Any) -> tuple[str, str]:
    return answer.text("reasoning"), answer.text("content")


async def test_a_handover() -> None:
    async with engines(SCRIPT, 2) as (home, answering), relaying(home.url) as relayed:
        await handed(home, answering.url)
        own = {"meridian_tenant": "t", "meridian_max_think_tokens": 50}
        fields = {"temperature": 0.5, "presence_penalty": 0, "stop": ["nowhere"], "min_tokens": None}
        fields |= {"reasoning_effort": "low", "vllm_xargs": own}
        async with relayed.session.post(
            relayed.url + CHAT, json=BODY | fields, headers={"X-Request-Id": "mine", "Authorization": "Bearer key"}
        ) as response:
            text = await response.text()
            assert response.headers.items() >= (CORS | {"X-Request-Id": "mine"}).items()
        assert "meridian" not in text
        (_, first), (path, second) = home.seen[0], answering.seen[0]
        assert (first["vllm_xargs"], first["return_token_ids"]) == (own | {"meridian_handover_candidate": 1}, True)
        # An engine that reads KV keeps the blocks of a request with parameters for ever unless it transfers them.
        assert "kv_transfer_params" not in first
        assert path == "/v1/completions"
        assert second.pop("prompt") == PROMPT + SCRIPT.tokens[:KNOWN]
        assert second.pop("vllm_xargs") == {
            "meridian_tenant": "t",
            "meridian_chat": 1,
            "meridian_effort": "low",
            "meridian_handover": "ref-1",
            "meridian_prompt_tokens": len(PROMPT),
        }
        assert second == {
            "model": "m",
            "temperature": 0.5,
            "presence_penalty": 0,
            "stop": ["nowhere"],
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "max_tokens": 100 - KNOWN,
            "min_tokens": 0,
            "kv_transfer_params": PARAMS,
        }
        for engine in (home, answering):
            assert engine.headers[0]["authorization"] == "Bearer key"
            assert engine.headers[0]["x-request-id"] == "mine"
        chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line and line != "data: [DONE]"]
        assert {(c["id"], c["object"], c["created"], c["model"]) for c in chunks} == {
            ("chatcmpl-mine", "chat.completion.chunk", 1, "m")
        }
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert chunks[0]["prompt_token_ids"] is None
        assert {choice["token_ids"] for c in chunks[1:] for choice in c["choices"]} == {None}
        assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
        assert relayed.results() == {"handed_over": 1}
        assert relayed.value("meridian_relay_gap_seconds_count") == 1


async def test_the_clients_chunks_are_those_of_the_engine() -> None:
    async with engines(SCRIPT, 1) as (home,), relaying(home.url) as relayed:
        for options in ({"include_usage": True}, None):
            headers = {"X-Request-Id": "x"}
            texts = []
            for url in (home.url, relayed.url):
                body = BODY | {"stream_options": options}
                async with relayed.session.post(url + CHAT, json=body, headers=headers) as response:
                    texts.append(await response.text())
            assert texts[0] == texts[1]
        assert relayed.results() == {"one_engine": 2}


async def test_repeated_headers_reach_each_engine() -> None:
    async with engines(SCRIPT, 2) as (home, answering), relaying(home.url) as relayed:
        await handed(home, answering.url)
        sent = [("X-Forwarded-For", "10.0.0.1"), ("X-Forwarded-For", "10.0.0.2"), ("Cookie", "a=1"), ("Cookie", "b=2")]
        sent += [("X-Request-Id", "one"), ("X-Request-Id", "two")]
        async with relayed.session.post(relayed.url + CHAT, json=BODY, headers=CIMultiDict(sent)) as response:
            assert (response.status, await response.read() != b"") == (200, True)
        for headers in (home.headers[0], answering.headers[0]):
            assert headers.getall("X-Forwarded-For") == ["10.0.0.1", "10.0.0.2"]
            assert headers.getall("Cookie") == ["a=1", "b=2"]
            assert headers.getall("X-Request-Id") == ["one"], "a request has one"
            assert headers.getall("Content-Type") == ["application/json"]


async def test_comments_of_an_idle_stream_reach_the_client() -> None:
    """By them `--sse-keep-alive-interval` keeps proxies from closing the connection while the client waits."""
    comment = ": keep-alive\n\n"
    async with engines(SCRIPT, 2) as (home, answering), relaying(home.url) as relayed:
        await handed(home, answering.url)
        home.usual.idles = answering.usual.idles = True
        async with relayed.session.post(relayed.url + CHAT, json=BODY) as response:
            text = await response.text()
        assert text.startswith(comment)
        assert text.count(comment) > text.count("data: "), "both engines send more chunks than the client gets"
        assert relayed.results() == {"handed_over": 1}
        body = BODY | {"stream": False, "stream_options": None}
        async with relayed.session.post(relayed.url + CHAT, json=body) as response:
            assert (await response.json())["choices"][0]["message"]["content"] == ANSWER


async def test_the_client_has_the_head_before_the_first_token() -> None:
    """Clients and proxies may wait for it for less time than a request waits for its turn."""
    begins = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"X-Engine": "it", "Content-Type": "text/event-stream"})
        await response.prepare(request)
        await begins.wait()
        return response

    async with serving(answer) as engine, relaying(engine) as relayed:
        try:
            asked = relayed.session.post(relayed.url + CHAT, json=BODY)
            async with asyncio.timeout(LONG_S), asked as response:
                assert (response.status, response.headers["X-Engine"]) == (200, "it")
                begins.set()
                assert "BadGatewayError" in await response.text()
        finally:
            begins.set()


async def test_a_refusal_after_the_head_is_an_error_event() -> None:
    async with engines(SCRIPT, 2) as (home, other), relaying(home.url, other.url) as relayed:
        home.usual, other.usual = Plan(breaks_after=0), Plan(status=429)
        answer = await relayed.ask()
        assert (answer.status, answer.error, answer.chunks) == (200, {"message": "refused"}, [])
        assert relayed.results() == {"one_engine": 1}


async def test_without_a_limit_the_context_is_the_limit() -> None:
    async with engines(SCRIPT, 2) as (home, answering), relaying(home.url) as relayed:
        await handed(home, answering.url)
        for _ in range(2):
            assert whole(await relayed.ask(max_tokens=None)) == (THOUGHT, ANSWER)
        assert answering.seen[1][1]["max_tokens"] == CONTEXT - len(PROMPT) - KNOWN


async def test_each_engine_has_a_context_of_its_own() -> None:
    """Engines of one model may differ, and an engine may come back with another length."""
    async with engines(SCRIPT, 2) as (home, other), relaying(home.url, other.url) as relayed:
        for context_tokens in (CONTEXT, CONTEXT // 2):
            other.context_tokens = context_tokens
            home.plans.append(Plan(breaks_after=2))
            assert whole(await relayed.ask(max_tokens=None)) == (THOUGHT, ANSWER)
            assert other.seen[-1][1]["max_tokens"] == context_tokens - len(PROMPT) - 2


@pytest.mark.parametrize("most", [None, 100])
async def test_the_limit_that_the_engine_chose_holds_after_the_handover(most: int | None) -> None:
    """vLLM uses the model's or the server's limit if the client names none or a higher one."""
    async with engines(SCRIPT, 2) as (home, answering), relaying(home.url) as relayed:
        await handed(home, answering.url, max_tokens=KNOWN + 2)
        answer = await relayed.ask(max_tokens=most)
        assert answering.seen[0][1]["max_tokens"] == 2
        assert (answer.ending(), answer.usage()["completion_tokens"]) == (("length", None), KNOWN + 2)


@pytest.mark.parametrize(("params", "expires_ms"), [(None, 60_000), (PARAMS, 0)])
async def test_no_transfer_without_parameters_or_after_half_of_the_lease(params: Any, expires_ms: float) -> None:
    async with engines(SCRIPT, 2) as (home, answering), relaying(home.url) as relayed:
        await handed(home, answering.url, params=params, expires_ms=expires_ms)
        assert whole(await relayed.ask()) == (THOUGHT, ANSWER)
        assert "kv_transfer_params" not in answering.seen[0][1]
        assert relayed.results() == {"recomputed": 1}


async def test_no_token_is_left() -> None:
    async with engines(SCRIPT, 2) as (home, answering), relaying(home.url) as relayed:
        await handed(home, answering.url)
        answer = await relayed.ask(max_tokens=KNOWN)
        assert (whole(answer), answer.ending()) == ((THOUGHT, ""), ("length", None))
        assert answer.usage()["completion_tokens"] == KNOWN
        assert (answering.seen, relayed.results()) == ([], {"one_engine": 1})


@pytest.mark.parametrize("fault", ["refused", "status", "unreadable", "unsaid"])
async def test_the_thinking_engine_finishes_what_nobody_else_continues(fault: str) -> None:
    async with engines(SCRIPT, 2) as (home, answering), relaying(home.url) as relayed:
        url = f"http://127.0.0.1:{free_port()}" if fault == "refused" else answering.url
        await handed(home, url)
        answering.usual = Plan(status=500)
        if fault == "unreadable":
            home.usual = Plan(handover="meridian-handover:{")
        if fault == "unsaid":
            # The engine's agent failed after it had the request stopped.
            home.usual = Plan(handover=END)
        assert whole(await relayed.ask()) == (THOUGHT, ANSWER)
        path, body = home.seen[1]
        assert (path, "kv_transfer_params" in body) == ("/v1/completions", False)
        assert body["vllm_xargs"].get("meridian_handover") == (None if fault.startswith("un") else "ref-1")
        assert relayed.results() == {"finished_on_thinking_engine": 1}


async def test_broken_thinking_goes_on_at_the_newest_answering_engine() -> None:
    async with engines(SCRIPT, 2) as (home, answering), relaying(home.url) as relayed:
        await handed(home, answering.url)
        await relayed.ask()
        home.usual = Plan(breaks_after=2)
        answer = await relayed.ask(vllm_xargs={"meridian_max_think_tokens": 50})
        assert whole(answer) == (THOUGHT, ANSWER)
        _, body = answering.seen[1]
        assert body["skip_special_tokens"] is False
        limits = {"meridian_max_think_tokens": 48, "meridian_prompt_tokens": len(PROMPT)}
        assert body["vllm_xargs"] == limits | {"meridian_chat": 1}
        assert relayed.results() == {"handed_over": 1, "one_engine": 1}
        assert relayed.value("meridian_relay_resumed_total", stage="thinking") == 1


async def test_a_request_without_text_begins_anew() -> None:
    async with engines(SCRIPT, 2) as (home, other), relaying(home.url, other.url) as relayed:
        home.usual = Plan(breaks_after=0)
        answer = await relayed.ask()
        assert (whole(answer), [path for path, _ in other.seen]) == ((THOUGHT, ANSWER), [CHAT])


async def test_a_break_within_a_character_needs_no_detokenizer() -> None:
    """The relay goes back to the last chunk with text if the engine does not say the text of tokens."""
    within = SCRIPT.tokens.index(END) + 6
    async with engines(SCRIPT, 2) as (home, other), relaying(home.url, other.url) as relayed:
        other.detokenizes = False
        home.usual = Plan(breaks_after=within)
        assert whole(await relayed.ask()) == (THOUGHT, ANSWER)
        assert len(other.seen[0][1]["prompt"]) == len(PROMPT) + within - 1
        assert relayed.value("meridian_relay_resumed_total", stage="answer") == 1


async def test_a_chunk_whose_end_marker_the_parser_misses() -> None:
    async with engines(SCRIPT, 2) as (home, answering), relaying(home.url) as relayed:
        home.usual = Plan(sizes=[KNOWN], handover=handover(answering.url))
        home.cuts_at_marker = True
        assert whole(await relayed.ask()) == (THOUGHT, ANSWER)


@pytest.mark.parametrize("streamed", [True, False])
async def test_all_engines_fail(streamed: bool) -> None:
    async with engines(SCRIPT, 2) as (home, other), relaying(home.url, other.url) as relayed:
        home.usual, other.usual = Plan(status=500), Plan(status=503)
        answer = await relayed.ask(stream=streamed, stream_options=None)
        assert (answer.status, answer.error) == (503, {"message": "refused"}), "the newest error of an engine"
        assert answer.headers.items() >= (CORS | {"Retry-After": "7"}).items()
        home.usual = other.usual = Plan(breaks_after=2)
        answer = await relayed.ask(stream=streamed, stream_options=None)
        assert answer.error is not None
        assert (answer.status, answer.error["code"]) == (200 if streamed else 502, 502)
        assert relayed.results() == {"failed": 2}


async def test_a_refusal_reaches_the_client() -> None:
    async with engines(SCRIPT, 1) as (home,), relaying(home.url) as relayed:
        home.usual = Plan(status=422)
        answer = await relayed.ask()
        assert (answer.status, answer.error) == (422, {"message": "refused"})
        assert answer.headers.items() >= CORS.items()
        assert relayed.results() == {"one_engine": 1}


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_refusal_in_a_stream_reaches_the_client(streamed: bool) -> None:
    """vLLM finds some faults of a request only after its stream has begun."""
    async with engines(SCRIPT, 2) as (home, other), relaying(home.url, other.url) as relayed:
        home.usual = other.usual = Plan(event=400)
        body = BODY if streamed else BODY | {"stream": False, "stream_options": None}
        said = []
        for url in (other.url, relayed.url):
            async with relayed.session.post(url + CHAT, json=body) as response:
                text = await response.text()
                error, *rest = text.removeprefix("data: ").strip().split("\n\n")
                said.append((response.status, response.content_type, json.loads(error), rest))
                assert response.headers.items() >= CORS.items()
        assert said[0] == said[1]
        assert said[0][0] == (200 if streamed else 400)
        assert (len(home.seen), len(other.seen), relayed.results()) == (1, 1, {"one_engine": 1})


async def test_a_fault_of_the_engine_in_a_stream_does_not_reach_the_client() -> None:
    async with engines(SCRIPT, 2) as (home, other), relaying(home.url, other.url) as relayed:
        home.usual = Plan(event=500)
        assert whole(await relayed.ask()) == (THOUGHT, ANSWER)


async def test_one_json_object() -> None:
    async with engines(SCRIPT, 3) as (home, answering, alone), relaying(home.url) as relayed:
        await handed(home, answering.url)
        bodies = []
        for url in (alone.url, relayed.url):
            body = BODY | {"stream": False, "stream_options": None}
            async with relayed.session.post(url + CHAT, json=body, headers={"X-Request-Id": "x"}) as response:
                bodies.append(await response.read())
                assert response.headers["Content-Type"] == "application/json"
                assert response.headers.items() >= CORS.items()
        assert bodies[0] == bodies[1]
        assert relayed.results() == {"handed_over": 1}


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("after_handover", [True, False])
async def test_a_client_that_leaves_ends_its_request(streamed: bool, after_handover: bool) -> None:
    async with engines(SCRIPT, 2) as (home, answering), relaying(home.url) as relayed:
        if after_handover:
            await handed(home, answering.url)
        engine = answering if after_handover else home
        engine.plans.append(Plan(waits_after=1))
        body = BODY | ({} if streamed else {"stream": False, "stream_options": None})
        leaving = asyncio.create_task(relayed.session.post(relayed.url + CHAT, json=body))
        await engine.waiting.wait()
        leaving.cancel()
        (left,) = await asyncio.gather(leaving, return_exceptions=True)
        if isinstance(left, aiohttp.ClientResponse):
            # The response had begun, so nothing was left to cancel.
            left.close()
        await engine.gone.wait()
        await relayed.relay.stop()
        assert relayed.results() == {"client_gone": 1}
        assert relayed.value("meridian_relay_in_flight") == 0


async def test_a_client_that_leaves_while_all_engines_fail(caplog: pytest.LogCaptureFixture) -> None:
    async with engines(SCRIPT, 1) as (home,), relaying(home.url) as relayed:
        home.usual = Plan(waits_after=1, breaks_after=2)
        left = asyncio.Event()
        write = StreamedReply._write

        async def leaves(reply: StreamedReply, event: bytes) -> None:
            if b'"error"' in event:
                # The relay learns of it by its next write, before its handler is cancelled.
                assert reply._request.transport is not None
                reply._request.transport.abort()
                left.set()
            await write(reply, event)

        with patch.object(StreamedReply, "_write", leaves):
            asking = asyncio.create_task(relayed.ask())
            await home.waiting.wait()
            home.go.set()
            await left.wait()
            with pytest.raises(aiohttp.ClientError):
                await asking
        await relayed.relay.stop()
        assert relayed.results() == {"client_gone": 1}
        assert "Traceback" not in caplog.text


async def test_stop_lets_requests_finish() -> None:
    async with engines(SCRIPT, 1) as (home,), relaying(home.url) as relayed:
        home.usual = Plan(waits_after=1)
        asking = asyncio.create_task(relayed.ask())
        await home.waiting.wait()
        stopping = asyncio.create_task(relayed.relay.stop())
        await refused(relayed)
        home.go.set()
        assert whole(await asking) == (THOUGHT, ANSWER)
        await stopping
        assert relayed.results() == {"one_engine": 1}


@pytest.mark.parametrize("drain_s", [0.0, 0.01])
async def test_stop_ends_requests_after_the_drain_time(drain_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay ends them itself: aiohttp would wait for twice the time, and for ever with 0."""
    monkeypatch.setattr(listener_module, "STOP_S", 1e6)
    async with engines(SCRIPT, 1) as (home,), relaying(home.url, drain_s=drain_s) as relayed:
        home.usual = Plan(waits_after=1)
        asking = asyncio.create_task(relayed.ask())
        await home.waiting.wait()
        async with asyncio.timeout(LONG_S):
            await relayed.relay.stop()
        with pytest.raises(aiohttp.ClientPayloadError):
            await asking
        await home.gone.wait()
        assert relayed.results() == {"failed": 1}


async def refused(relayed: Relayed) -> None:
    """Wait until the relay accepts no connection."""
    while True:
        try:
            async with aiohttp.ClientSession() as session, session.get(relayed.url + "/v1/models"):
                pass
        except aiohttp.ClientConnectorError:
            return


async def test_other_requests_pass_byte_for_byte() -> None:
    async with engines(SCRIPT, 1) as (home,), relaying(home.url) as relayed:
        sent = bytes(range(256)) * 3000
        headers = CIMultiDict({"X-Odd": "é", "Authorization": "k", "Connection": "keep-alive, X-Hop", "X-Hop": "1"})
        headers.extend({"Content-Encoding": "gzip", "Accept-Encoding": "br", "User-Agent": "u", "Accept": "*/*"})
        headers.extend({"Connection": "X-Other-Hop", "X-Other-Hop": "2"})
        got = []
        for url in (home.url, relayed.url):
            async with relayed.session.request(
                "PUT", URL(f"{url}/echo/a%2Fb?q=%20x", encoded=True), data=sent, headers=headers
            ) as response:
                assert (response.status, response.headers.getall("X-Two")) == (418, ["a", "b"])
                assert response.content_type == "text/odd"
                line, _, body = (await response.read()).partition(b"\n")
                method, target, names = json.loads(line)
                kept = [each for each in names if each[0] not in ("host", "connection", "x-hop", "x-other-hop")]
                got.append((method, target, kept, body))
        assert got[0] == got[1]
        assert got[0][:2] == ("PUT", "/echo/a%2Fb?q=%20x")
        assert got[0][3] == sent
        assert not {"x-hop", "x-other-hop"} & {name for name, _ in names}, "they are for the first hop alone"


LONG = b"a" * 60_000


@asynccontextmanager
async def naming_headers() -> AsyncIterator[str]:
    """Yield the URL of a server with a long header and one in Latin-1, which answers with the head of the request."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nX-Long: " + LONG + b"\r\nX-UTF-8: \xc3\xa9\r\nX-Latin: caf\xe9\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n" % len(head) + head)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, limit=1 << 20) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("header", "answer"),
    [
        (b"X-Token: " + LONG, b"HTTP/1.1 200 "),
        ("X-User: é".encode(), b"HTTP/1.1 200 "),
        (b"X-User: caf\xe9", b"HTTP/1.1 400 "),
    ],
    ids=["long", "UTF-8", "Latin-1"],
)
async def test_headers_pass_whole_or_not_at_all(header: bytes, answer: bytes) -> None:
    async with naming_headers() as engine, relaying(engine) as relayed:
        url = URL(relayed.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + header + b"\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(answer)
        assert (header in body, LONG in head, b"X-UTF-8: \xc3\xa9" in head) == (answer.endswith(b"200 "),) * 3
        assert b"X-Latin" not in head


async def test_the_log_names_an_engine_that_breaks_off_its_response(caplog: pytest.LogCaptureFixture) -> None:
    async with engines(SCRIPT, 1) as (home,), relaying(home.url) as relayed:
        home.plans.append(Plan(breaks_after=2))
        with pytest.raises(aiohttp.ClientError):
            await relayed.ask(seed=3)
        assert f"POST {CHAT}: {home.url} broke off its response" in caplog.text


async def test_the_log_does_not_have_what_may_be_a_key(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"no HTTP\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        engine = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with relaying(engine) as relayed:
            url = f"{relayed.url}/v1/models?key=SECRET"
            async with relayed.session.get(url, headers={"Authorization": "SECRET"}) as response:
                assert response.status == 502
    assert f"GET /v1/models: {engine} failed: " in caplog.text
    assert "SECRET" not in caplog.text


async def test_a_redirect_is_for_the_client() -> None:
    """The relay follows none, because it would send the client's key to another host."""
    async with engines(SCRIPT, 2) as (home, other), relaying(home.url, other.url) as relayed:
        home.usual = Plan(status=307)
        body = BODY | {"seed": 3}
        async with relayed.session.post(relayed.url + CHAT, json=body, allow_redirects=False) as response:
            assert (response.status, response.headers["Location"]) == (307, "/v1/models")
        assert whole(await relayed.ask()) == (THOUGHT, ANSWER), "another engine serves an eligible request"
        assert [path for path, _ in home.seen + other.seen] == [CHAT] * 3


@asynccontextmanager
async def serving(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """Yield the URL of a server that answers all requests so."""
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def redirecting(location: str) -> AsyncIterator[str]:
    """Yield the URL of a server that redirects all requests; `HOST` in the location is its own address, from Host."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": location.replace("HOST", request.host)})

    async with serving(answer) as url:
        yield url


async def test_no_question_of_the_relay_follows_a_redirect() -> None:
    """It carries the client's headers, which may be keys."""
    async with engines(SCRIPT, 1) as (other,), redirecting(f"{other.url}/detokenize") as engine:
        asked = Engines([engine])
        try:
            assert await asked.text(engine, "m", SCRIPT.tokens[:1], CIMultiDict({"X-Api-Key": "key"})) is None
        finally:
            await asked.close()


@pytest.mark.parametrize(
    ("named", "got"),
    [
        ("http://HOST/v1/models?a=%2Fb#c", "/v1/models?a=%2Fb#c"),
        ("http://HOST//evil.example", "/evil.example"),
        ("https://HOST/", "/"),
        ("http://HOST", "/"),
        ("//HOST/docs", "/docs"),
        ("/v1/models", "/v1/models"),
        ("https://elsewhere.example/login", "https://elsewhere.example/login"),
        ("http://[", "http://["),
    ],
)
async def test_a_redirect_to_the_engine_itself_leads_to_the_relay(named: str, got: str) -> None:
    """vLLM redirects paths with a slash too many to its own address, which clients of the relay may not reach."""
    async with (
        redirecting(named) as engine,
        relaying(engine) as relayed,
        relayed.session.get(f"{relayed.url}/v1/models/", allow_redirects=False) as response,
    ):
        assert (response.status, response.headers["Location"]) == (307, got)


async def test_an_ineligible_chat_request_passes_as_it_is() -> None:
    async with engines(SCRIPT, 2) as (home, answering), relaying(home.url) as relayed:
        await handed(home, answering.url)
        answer = await relayed.ask(seed=3)
        assert whole(answer) == (THOUGHT, ANSWER)
        assert home.seen[0][1] == BODY | {"seed": 3}
        assert relayed.results() == {}


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""])
async def test_a_body_that_is_not_called_json_passes_as_it_is(media_type: str) -> None:
    """vLLM refuses it, so that no web page of another site has a chat run by its reader's browser."""
    async with engines(SCRIPT, 1) as (home,), relaying(home.url) as relayed:
        headers = {"Content-Type": media_type} if media_type else None
        skipped = {"Content-Type"} if headers is None else set[str]()
        async with relayed.session.post(
            relayed.url + CHAT, data=json.dumps(BODY).encode(), headers=headers, skip_auto_headers=skipped
        ) as response:
            assert (response.status, home.seen) == (400, [])
        headers = {"Content-Type": "Application/JSON; charset=utf-8"}
        async with relayed.session.post(
            relayed.url + CHAT, data=json.dumps(BODY).encode(), headers=headers
        ) as response:
            assert response.status == 200
        assert relayed.results() == {"one_engine": 1}


class Parts:
    """The body of a response, in one part."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def iter_any(self) -> AsyncIterator[bytes]:
        yield self._data


@pytest.mark.parametrize(
    "event",
    [
        "5",
        "[]",
        '{"foo": 1}',
        '{"choices": null}',
        '{"object": "error", "code": 500}',
        '{"choices": [5]}',
        '{"choices": [{"index": 0}]}',
        '{"choices": [{"delta": null}]}',
    ],
)
async def test_an_event_that_is_no_chunk_breaks_the_stream(event: str) -> None:
    """Another engine then continues the request, as after each break."""
    content: Any = Parts(f'data: {{"choices": []}}\n\ndata: {event}\n\n'.encode())
    with pytest.raises(EngineFailed, match="an event is no chunk: ") as failed:
        assert [chunk async for chunk in _events(content)] == [{"choices": []}]
    assert failed.value.broke


async def test_an_engine_that_refuses_connections_is_skipped() -> None:
    absent = f"http://127.0.0.1:{free_port()}"
    async with engines(SCRIPT, 1) as (home,), relaying(absent, home.url) as relayed:
        for path in ("/v1/models", "/v1/models"):
            async with relayed.session.get(relayed.url + path) as response:
                assert response.status == 200
        assert whole(await relayed.ask()) == (THOUGHT, ANSWER)
    async with relaying(absent) as relayed, relayed.session.get(relayed.url + "/v1/models") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (502, 502)


async def test_engines_that_are_down_fail_no_request_of_a_new_relay() -> None:
    absent = [f"http://127.0.0.1:{free_port()}" for _ in range(4)]
    async with engines(SCRIPT, 1) as (home,), relaying(*absent, home.url) as relayed:
        assert whole(await relayed.ask()) == (THOUGHT, ANSWER)


@asynccontextmanager
async def closing(number: int) -> AsyncIterator[list[str]]:
    """Yield the URLs of servers that close each connection without an answer, as a published port of a container does
    while nothing listens within it."""
    servers = [await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) for _ in range(number)]
    try:
        yield [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    finally:
        for server in servers:
            server.close()


async def test_an_engine_that_closes_connections_is_skipped() -> None:
    async with closing(1) as (gone,), engines(SCRIPT, 1) as (home,), relaying(gone, home.url) as relayed:
        for status in (502, 200, 200):
            async with relayed.session.get(relayed.url + "/v1/models") as response:
                assert response.status == status


@pytest.mark.parametrize("fault", ["closes", "status"])
async def test_engines_that_serve_nothing_use_up_no_failures(fault: str) -> None:
    async with closing(3) as gone, engines(SCRIPT, 4) as (*bad, good):
        for engine in bad:
            engine.usual = Plan(status=503)
        urls = gone if fault == "closes" else [engine.url for engine in bad]
        async with relaying(*urls, good.url) as relayed:
            with patch.object(engines_module, "SKIP_S", 0.0):
                # A new relay does not know that they serve nothing.
                assert (await relayed.ask()).status == (502 if fault == "closes" else 503)
                for _ in range(2):
                    assert whole(await relayed.ask()) == (THOUGHT, ANSWER)


async def test_a_request_stops_at_most_three_engines_that_served() -> None:
    """It may be the cause of their failure."""
    async with engines(SCRIPT, 4) as all_engines, relaying(*(engine.url for engine in all_engines)) as relayed:
        for engine in all_engines:
            engine.usual = Plan(waits_after=1)
        served = [asyncio.create_task(relayed.ask()) for _ in all_engines]
        for engine in all_engines:
            await engine.waiting.wait()
            engine.usual = Plan(status=500)
            engine.go.set()
        await asyncio.gather(*served)
        assert (await relayed.ask()).status == 500
        assert sum(len(engine.seen) for engine in all_engines) == 4 + 3


@pytest.mark.parametrize("fields", [{}, {"seed": 1}], ids=["eligible", "passed as it is"])
async def test_an_engine_that_answers_with_an_error_is_skipped(fields: dict[str, Any]) -> None:
    async with engines(SCRIPT, 2) as (home, other), relaying(home.url, other.url) as relayed:
        home.usual = Plan(status=503)
        for _ in range(3):
            await relayed.ask(**fields)
        assert len(home.seen) == 1
        assert len(other.seen) == (2 if fields else 3)


async def test_engines_that_are_gone_take_no_memory() -> None:
    """Answering engines come and go; each new pod has another address."""
    urls = [f"http://127.0.0.{1 + number}:{free_port()}" for number in range(20)]
    async with engines(SCRIPT, 1) as (home,), relaying(home.url) as relayed:
        with patch.object(engines_module, "MAX_REMEMBERED", 3):
            for url in urls:
                await handed(home, url)
                assert whole(await relayed.ask()) == (THOUGHT, ANSWER)
            relayed_to = relayed.relay._engines
            held = {url for table in vars(relayed_to).values() if isinstance(table, Collection) for url in table}
            assert held & {*urls} == {*urls[-3:]}
            assert [relayed_to.serves(url) for url in urls] == [True] * 17 + [False] * 3


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="only Linux shows the timers of connections")
async def test_the_system_watches_over_silent_engines() -> None:
    """A machine that is gone closes no connection, so only the system's questions find out."""
    async with engines(SCRIPT, 1) as (home,), relaying(home.url) as relayed:
        home.usual = Plan(waits_after=1)
        asking = asyncio.create_task(relayed.ask())
        await home.waiting.wait()
        there = f":{URL(home.url).port:04X}"
        connections = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
        # The line is of the relay's end: state 01 is established, and timer 02 asks whether the other end is there.
        found = [fields[5][:2] for fields in connections if fields[2].endswith(there) and fields[3] == "01"]
        assert found == ["02"]
        home.go.set()
        assert whole(await asking) == (THOUGHT, ANSWER)


async def test_names_keep_their_addresses_while_no_name_server_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    reason: int | None = None
    real = socket.getaddrinfo

    def getaddrinfo(*asked: Any, **more: Any) -> Any:
        if reason is not None:
            raise socket.gaierror(reason, "said so")
        return real(*asked, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(engines_module, "NAMES_S", 0)
    async with engines(SCRIPT, 1) as (home,), relaying(home.url.replace("127.0.0.1", "localhost")) as relayed:

        async def status() -> int:
            async with relayed.session.get(relayed.url + "/v1/models") as response:
                return response.status

        assert await status() == 200
        reason = socket.EAI_AGAIN
        assert await status() == 200
        reason = socket.EAI_NONAME
        assert await status() == 502, "the name is gone"
    async with relaying("http://localhost:1") as relayed:
        reason = socket.EAI_AGAIN
        assert await status() == 502, "the name was never found"


async def test_the_engine_with_the_fewest_requests_is_next() -> None:
    async with engines(SCRIPT, 2) as (home, other), relaying(home.url, other.url) as relayed:
        home.usual = Plan(waits_after=1)
        first = asyncio.create_task(relayed.ask())
        await home.waiting.wait()
        await relayed.ask()
        assert (len(home.seen), len(other.seen)) == (1, 1)
        home.go.set()
        assert whole(await first) == whole(await ask(relayed.session, other.url))
