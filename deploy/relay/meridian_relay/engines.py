"""Talks to engines: chooses one, streams its chunks, and asks for the text of tokens and the length of the context.

The module belongs to one event loop. It does not know how a request goes on after an engine has failed.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp

from meridian_relay.headers import MAX_LINE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence

    from aiohttp import ClientResponse
    from multidict import MultiMapping
    from yarl import URL

K = TypeVar("K")
V = TypeVar("V")

# Seconds for which an engine that gave no answer, or an error, gets no request if another is there.
SKIP_S = 2.0
# Largest number of failing engines that are remembered, and of names. Answering engines come and go, and may come back
# elsewhere.
MAX_REMEMBERED = 256
CONNECT_S = 5.0
# Seconds for which a name's addresses count without another question.
NAMES_S = 10
# Seconds for an answer that takes no generation.
ANSWER_S = 5.0
# Seconds of silence after which an engine's machine is asked whether it is there, and between three such questions.
SILENCE_S, ASK_S = 15, 5
UNREACHABLE = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
# Errors of an engine before the head of its response. A client whose body cannot be read causes others.
FAILURES = (aiohttp.ClientOSError, aiohttp.ServerConnectionError, aiohttp.ClientResponseError)


class Refused(Exception):  # noqa: N818 - the name states the condition
    """An engine has answered with an error: this status, these headers and this body."""

    def __init__(self, status: int, headers: MultiMapping[str], body: bytes) -> None:
        super().__init__(f"status {status}: {body[:200].decode(errors='replace')}")
        self.status, self.headers, self.body = status, headers, body

    def event(self) -> dict[str, Any] | None:
        """Return the body as the error event of a stream; None if it is none."""
        with suppress(ValueError, RecursionError):
            event = json.loads(self.body)
            return event if isinstance(event, dict) and isinstance(event.get("error"), dict) else None
        return None


class EngineFailed(Exception):  # noqa: N818 - the name states the condition
    """An engine cannot be reached, has answered with an error, or its stream has broken.

    broke: the stream had begun. answer: what the engine has answered instead of a stream, None if nothing. listens:
    something may listen there, so that the request may have been the cause. refusal: the error event by which a stream
    says that it was, None if there is none.
    """

    def __init__(
        self,
        message: str,
        broke: bool = False,
        *,
        answer: Refused | None = None,
        listens: bool = True,
        refusal: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.broke, self.answer, self.listens, self.refusal = broke, answer, listens, refusal

    @property
    def status(self) -> int:
        """The status of the answer, 0 if there is none."""
        return 0 if self.answer is None else self.answer.status


class Engines:
    """The thinking engines, and what the relay knows of other engines.

    newest_answering: the URL of the engine to which a request was handed over last, empty before the first handover.
    """

    def __init__(self, thinking: Sequence[str]) -> None:
        self.newest_answering = ""
        # Requests under way by engine.
        self._under_way: Counter[str] = Counter()
        # For each thinking engine the time until which others come before it.
        self._skipped_until = dict.fromkeys(thinking, 0.0)
        # Engines whose newest answer was none, or an error; the newest comes last.
        self._failing: dict[str, None] = {}
        # Each request has a connection of its own, because an engine may close an idle connection while the next
        # request is on its way. Bodies pass as they are, and no client's cookie reaches another client's request.
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, force_close=True, resolver=_Resolver(), ttl_dns_cache=NAMES_S, socket_factory=_socket
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            max_line_size=MAX_LINE,
            max_field_size=MAX_LINE,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def close(self) -> None:
        await self.session.close()

    def by_load(self) -> list[str]:
        """Return the thinking engines: fewest requests first, engines that have just failed last."""
        now = time.monotonic()
        until = self._skipped_until
        return sorted(until, key=lambda url: (until[url] > now, self._under_way[url]))

    def serves(self, url: str) -> bool:
        """Return whether the engine answered its newest request without an error, or has had none yet."""
        return url not in self._failing

    @asynccontextmanager
    async def response(self, url: str, method: str, target: str | URL, **options: Any) -> AsyncIterator[ClientResponse]:
        """Send an engine a request, count it as under way, and yield the response once its head has come.

        An engine that fails at once has the fewest requests, and would get all, so others are preferred for SKIP_S.
        """
        self._under_way[url] += 1
        try:
            try:
                response = await self.session.request(method, target, allow_redirects=False, **options)
            except FAILURES:
                self._note(url, False)
                raise
            async with response:
                self._note(url, response.status < 500)
                yield response
        finally:
            self._under_way[url] -= 1
            if not self._under_way[url]:
                del self._under_way[url]

    def _note(self, url: str, serves: bool) -> None:
        if serves:
            self._failing.pop(url, None)
            return
        _remember(self._failing, url, None)
        if url in self._skipped_until:
            self._skipped_until[url] = time.monotonic() + SKIP_S

    async def chunks(
        self,
        url: str,
        path: str,
        body: dict[str, Any],
        headers: MultiMapping[str],
        begins: Callable[[MultiMapping[str]], Awaitable[None]] | None = None,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of a stream until its regular end, and an empty one for each comment. Raises EngineFailed or
        Refused.

        begins: is called with the response's headers before the first chunk.
        """
        begun = False
        try:
            async with self.response(url, "POST", url + path, json=body, headers=headers) as response:
                await _check(response)
                begun = True
                if begins is not None:
                    await begins(response.headers)
                async for chunk in _events(response.content):
                    yield chunk
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RecursionError) as error:
            listens = not isinstance(error, aiohttp.ClientConnectorError)
            raise EngineFailed(f"{type(error).__name__}: {error}", begun, listens=listens) from error

    async def text(self, url: str, model: str | None, tokens: Sequence[int], headers: MultiMapping[str]) -> str | None:
        """Return the text of tokens; None if the engine does not say it. Raises EngineFailed if nothing listens."""
        body = {"tokens": list(tokens)} | ({"model": model} if model else {})
        answer = await self._answer("POST", f"{url}/detokenize", headers, body)
        text = answer.get("prompt")
        return text if isinstance(text, str) else None

    async def context_tokens(self, url: str, model: str | None, headers: MultiMapping[str]) -> int:
        """Return the length of the model's context in tokens. Raises EngineFailed if the engine does not say it."""
        answer = await self._answer("GET", f"{url}/v1/models", headers)
        cards = answer.get("data") or []
        found: dict[str | None, int] = {
            card.get("id"): card["max_model_len"] for card in cards if card.get("max_model_len")
        }
        if not found:
            raise EngineFailed("/v1/models names no max_model_len")
        return found.get(model) or next(iter(found.values()))

    async def _answer(
        self, method: str, url: str, headers: MultiMapping[str], body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the JSON object that an engine answers, empty if it answers otherwise. Raises EngineFailed."""
        try:
            asked = self.session.request(method, url, json=body, headers=headers, allow_redirects=False)
            async with asyncio.timeout(ANSWER_S), asked as got:
                answer = json.loads(await got.read()) if got.status == 200 else {}
        except UNREACHABLE as error:
            raise EngineFailed(f"{type(error).__name__}: {error}") from error
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return {}
        return answer if isinstance(answer, dict) else {}


class _Resolver(aiohttp.ThreadedResolver):
    """Finds the addresses of engines' names, and takes those found last while no name server answers."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[tuple[str, int, int], list[aiohttp.abc.ResolveResult]] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[aiohttp.abc.ResolveResult]:
        asked = host, port, int(family)
        try:
            found = await super().resolve(host, port, family)
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN or asked not in self._found:
                raise
            return self._found[asked]
        _remember(self._found, asked, found)
        return found


def _remember(table: dict[K, V], key: K, value: V) -> None:
    """Make an entry the newest one of a table, from which the oldest goes if there are too many."""
    table.pop(key, None)
    table[key] = value
    if len(table) > MAX_REMEMBERED:
        del table[next(iter(table))]


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket to an engine, whose connection ends soon after the engine's machine is gone.

    A machine that is gone closes no connection, and an engine may be silent for as long as a request waits.
    """
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", SILENCE_S), ("TCP_KEEPINTVL", ASK_S), ("TCP_KEEPCNT", 3)):
        if (option := getattr(socket, name, None)) is not None:
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


async def _check(response: aiohttp.ClientResponse) -> None:
    """Raise EngineFailed or Refused unless the response is a stream."""
    if response.status == 200:
        return
    body = b""
    with suppress(aiohttp.ClientError, TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            body = await response.read()
    refused = Refused(response.status, response.headers, body)
    if 400 <= response.status < 500:
        raise refused
    raise EngineFailed(str(refused), answer=refused)


async def _events(content: aiohttp.StreamReader) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the JSON objects of server-sent events until `[DONE]`, and an empty one for each comment. Raises
    EngineFailed at an error event or a bare end.

    The first chunk names all tokens of the prompt, so a line may be longer than the reader's own limit.
    """
    held = b""
    async for part in content.iter_any():
        *lines, held = (held + part).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            if line.startswith(b":"):
                yield {}
            elif data and line.startswith(b"data:"):
                chunk = json.loads(data)
                if isinstance(chunk, dict) and "error" in chunk:
                    raise EngineFailed(str(chunk["error"])[:200], broke=True, refusal=_refusal(chunk))
                if not _is_chunk(chunk):
                    raise EngineFailed(f"an event is no chunk: {data[:200].decode(errors='replace')}", broke=True)
                yield chunk
    raise EngineFailed("the stream ended without [DONE]", broke=True)


def _is_chunk(event: Any) -> bool:
    """Whether an event has choices, each with a chat's delta or a completion's text."""
    choices = event.get("choices") if isinstance(event, dict) else None
    return isinstance(choices, list) and all(
        isinstance(choice, dict) and (isinstance(choice.get("delta"), dict) or isinstance(choice.get("text"), str))
        for choice in choices
    )


def _refusal(event: dict[str, Any]) -> dict[str, Any] | None:
    """Return an error event that says that the request is wrong; None if it says something else.

    vLLM checks some fields, such as token ids, only after a stream has begun.
    """
    error = event["error"]
    code = error.get("code") if isinstance(error, dict) else None
    return event if isinstance(code, int) and 400 <= code < 500 else None
