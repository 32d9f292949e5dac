"""Serves one request that several engines may serve after each other, so that the client sees one answer.

The module decides which engine continues a request, and from which token. It belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Protocol

from meridian_relay.bodies import CHAT, COMPLETIONS, HandoverTarget, Progress, continuation_of, next_body
from meridian_relay.engines import EngineFailed, Refused
from meridian_relay.replies import chunk_of
from meridian_relay.texts import ReceivedText

if TYPE_CHECKING:
    from aiohttp import web
    from multidict import MultiMapping

    from meridian_relay.bodies import CarriedRequest
    from meridian_relay.engines import Engines
    from meridian_relay.metrics import RelayMetrics

logger = logging.getLogger(__name__)

# Engines that may fail one request before it fails, because it may be the cause. Engines that refuse the connection do
# not count, nor those that failed the request before, unless they answer 500.
MAX_FAILURES = 3
# Seconds for which the relay waits for the usage after the last token.
USAGE_S = 1.0
# Tokens that may hold an incomplete character at the end of a chunk with several tokens.
MAX_CUT_TOKENS = 8
INCOMPLETE = "\ufffd"


class NoEngineLeft(Exception):  # noqa: N818 - the name states the condition
    """All engines that could serve a request have failed; the log has a line for each."""


class Reply(Protocol):
    async def begin(self, headers: MultiMapping[str]) -> None: ...

    @property
    def begun(self) -> bool: ...

    async def keep_alive(self) -> None: ...

    async def send(self, chunk: dict[str, Any]) -> None: ...

    async def end(self, usage: dict[str, Any]) -> web.StreamResponse: ...

    async def refuse(self, event: dict[str, Any]) -> web.StreamResponse: ...

    async def fail(self) -> web.StreamResponse: ...


class Exchange:
    """One request, from the thinking engine's first chunk to the last chunk of the engine that finishes it."""

    def __init__(
        self,
        request: CarriedRequest,
        reply: Reply,
        engines: Engines,
        metrics: RelayMetrics,
        *,
        headers: MultiMapping[str],
        marker: str,
    ) -> None:
        self.result = "one_engine"
        self._request, self._reply, self._engines, self._metrics = request, reply, engines, metrics
        self._headers = headers
        self._progress = Progress()
        self._text = ReceivedText(marker, request.stops, request.include_stop)
        self._form: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}
        self._home = ""
        self._continuation: HandoverTarget | None = None
        self._handed_over_s = 0.0
        self._failed: list[str] = []
        self._failures = 0
        # The newest error that an engine has answered as its own fault.
        self._error: Refused | None = None
        self._finished = self._gap_known = False
        # Number of tokens at the end of the newest chunk with text, and at the handover, which has all of its text.
        self._with_text = self._at_handover = 0
        # A stream has broken, and it is not settled yet which of its tokens count. `_engine_text`: the engine may hold
        # text back for stop strings or for its parser.
        self._unsettled = self._engine_text = False

    async def serve(self) -> web.StreamResponse:
        """Serve the request to its end and return the response. Raises ClientGone or Refused."""
        try:
            return await self._served()
        except NoEngineLeft:
            self.result = "failed"
            return await self._reply.fail()

    async def _served(self) -> web.StreamResponse:
        """As `serve`; raises NoEngineLeft, too."""
        while not self._finished:
            url = self._next_engine()
            served = self._engines.serves(url)
            try:
                await (self._continue(url) if self._begun else self._think(url))
            except EngineFailed as error:
                if error.refusal is not None and not self._form:
                    return await self._reply.refuse(error.refusal)
                self._failures += (served and error.listens) or error.broke or error.status == 500
                self._note_failure(url, error)
        usage, count = {**self._usage, **self._form, "choices": []}, len(self._progress.tokens)
        if self._continuation is not None:
            # Times of the thinking engine alone.
            usage.pop("metrics", None)
        usage["usage"] = {"prompt_tokens": len(self._progress.prompt), "total_tokens": 0} | usage.get("usage", {})
        usage["usage"] |= {"completion_tokens": count, "total_tokens": usage["usage"]["prompt_tokens"] + count}
        return await self._reply.end(usage)

    @property
    def _begun(self) -> bool:
        """Whether the client has text or is owed text of these tokens; otherwise the request can begin anew."""
        return self._continuation is not None or self._text.begun

    def _next_engine(self) -> str:
        """Return the engine that is to serve the request next. Raises NoEngineLeft, or Refused while the client has
        nothing yet and an engine has answered with an error."""
        order = [self._continuation.url, self._home] if self._continuation else []
        order += [*self._engines.by_load(), self._engines.newest_answering]
        left = [url for url in order if url and url not in self._failed]
        if not left or self._failures >= MAX_FAILURES:
            if self._error is not None and not (self._form or self._reply.begun):
                self.result = "failed"
                raise self._error
            raise NoEngineLeft
        return left[0]

    def _note_failure(self, url: str, error: EngineFailed) -> None:
        self._failed.append(url)
        if error.status >= 500:
            self._error = error.answer
        logger.warning("request %s: %s failed: %s", self._form.get("id", "without an id"), url, error)
        if error.broke:
            self._unsettled = True
            self._metrics.resumed(self._progress.thinking)

    async def _think(self, url: str) -> None:
        """Let an engine serve the request from its beginning, until it ends or is to be continued elsewhere."""
        self._home, self._engine_text, self._unsettled = url, True, False
        self._progress, self._with_text = Progress(), 0
        body, ended = self._request.first_body(), False
        try:
            async with (
                asyncio.timeout(None) as limit,
                aclosing(self._engines.chunks(url, CHAT, body, self._headers, self._reply.begin)) as chunks,
            ):
                async for chunk in chunks:
                    if not chunk:
                        await self._reply.keep_alive()
                    elif not chunk["choices"]:
                        self._usage = chunk
                    elif await self._pass_on(chunk):
                        ended = True
                        limit.reschedule(asyncio.get_running_loop().time() + USAGE_S)
        except Refused as refused:
            if self._form:
                raise EngineFailed(str(refused)) from refused
            if self._reply.begun:
                raise EngineFailed(str(refused), refusal=refused.event()) from refused
            raise
        except (EngineFailed, TimeoutError):
            if not ended:
                raise
        if not ended:
            raise EngineFailed("the stream ended without a finish_reason", broke=True)
        if self._continuation is None:
            self._finished = True

    async def _pass_on(self, chunk: dict[str, Any]) -> bool:
        """Pass a thinking engine's chunk on without what the client did not ask for; return whether it is the last."""
        choice = chunk["choices"][0]
        delta, finish_reason = choice["delta"], choice.get("finish_reason")
        if chunk.get("prompt_token_ids") is not None:
            self._progress.prompt = list(chunk["prompt_token_ids"])
            chunk["prompt_token_ids"] = None
        reasoning, content = delta.get("reasoning") or "", delta.get("content") or ""
        tokens = self._count(choice, bool(reasoning or content))
        if "token_ids" in choice:
            choice["token_ids"] = None
        if finish_reason is not None and (continuation := await self._instruction(choice, bool(content))):
            self._hand_over(continuation)
            choice["finish_reason"] = None
            del choice["stop_reason"]
            reasoning, content = await self._last_thought(reasoning, tokens), ""
            choice["delta"] = delta = {"reasoning": reasoning} if reasoning else {}
        self._text.note(reasoning, content)
        self._progress.thinking = not (self._text.answers or self._continuation)
        again = bool(self._form) and "role" in delta
        self._form = self._form or {name: chunk[name] for name in ("id", "object", "created", "model")}
        if (delta and not again) or choice["finish_reason"] is not None:
            await self._reply.send(chunk | self._form)
        return finish_reason is not None

    async def _instruction(self, choice: dict[str, Any], answers: bool) -> HandoverTarget | None:
        """Return where the request goes on, as the engine's final chunk says; None if the request has ended.

        If the engine's agent has failed after it had the request stopped, the chunk names the end marker alone.
        """
        reason, model = choice.get("stop_reason"), self._request.body.get("model")
        own = self._request.body.get("stop_token_ids", ())
        if not isinstance(reason, int) or reason in own or answers or self._text.answers:
            return continuation_of(reason)
        with suppress(EngineFailed):
            text = await self._engines.text(self._home, model, [reason], self._headers)
            return HandoverTarget() if text is not None and text.strip() == self._text.marker.strip() else None
        return None

    async def _last_thought(self, reasoning: str, tokens: list[int]) -> str:
        """Return the reasoning of the chunk that ends thinking.

        The text of the chunk lacks the end marker, as the marker has ended the generation. vLLM's parsers search the
        marker there if the chunk has several tokens, and then cut the text at a wrong place.
        """
        if len(tokens) < 2:
            return reasoning
        rest = full = None
        with suppress(EngineFailed):
            model = self._request.body.get("model")
            full = await self._engines.text(self._home, model, self._progress.tokens, self._headers)
        if full is None or (rest := self._text.missing(full)) is None:
            return reasoning
        thought = rest.partition(self._text.marker)[0]
        # Some parsers drop white space before the end marker.
        return reasoning if thought.rstrip() == reasoning.rstrip() else thought

    def _hand_over(self, continuation: HandoverTarget) -> None:
        if not continuation.url:
            logger.warning("request %s: the handover cannot be read", self._form.get("id"))
        self._continuation, self._handed_over_s = continuation, time.monotonic()
        self._engines.newest_answering = continuation.url or self._engines.newest_answering
        self._with_text = self._at_handover = len(self._progress.tokens)

    async def _continue(self, url: str) -> None:
        """Let an engine continue the request after its tokens so far."""
        if not self._progress.prompt:
            logger.warning("request %s: %s did not name the prompt's tokens", self._form["id"], self._home)
            raise NoEngineLeft
        if self._unsettled:
            await self._settle(url)
            if self._finished:
                return
        left = await self._tokens_left(url)
        if left <= 0:
            await self._send("", "", "length")
            return
        params, ref = self._transfer(url), self._continuation.ref if self._continuation else ""
        # An engine cannot find a stop string that began in the content before its first token.
        stops = () if self._text.answers else self._request.stops
        self._engine_text = bool(stops)
        whole = bool(stops) and not self._progress.thinking
        body = next_body(self._request, self._progress, left=left, ref=ref, kv_transfer_params=params, stops=stops)
        try:
            async with aclosing(self._engines.chunks(url, COMPLETIONS, body, self._headers)) as chunks:
                async for chunk in chunks:
                    if not chunk:
                        await self._reply.keep_alive()
                    elif chunk["choices"]:
                        self._note_second_leg(url, params is not None)
                        await self._take(chunk["choices"][0], whole)
                    if self._finished:
                        return
        except Refused as refused:
            raise EngineFailed(str(refused)) from refused
        raise EngineFailed("the stream ended without a finish_reason", broke=True)

    async def _take(self, choice: dict[str, Any], whole: bool) -> None:
        """Send the text of a completion's chunk. whole: all of it is content, in which the engine finds the stops."""
        text, reasons = choice["text"], (choice.get("finish_reason"), choice.get("stop_reason"))
        self._count(choice, bool(text))
        if whole:
            self._text.note("", text)
            await self._send("", text, *reasons)
        else:
            await self._feed(text, *reasons)

    async def _feed(self, text: str, finish_reason: str | None = None, stop_reason: int | str | None = None) -> None:
        """Send raw text, cut at the end marker and at stop strings."""
        reasoning, content, stop = self._text.feed(text, self._progress.thinking)
        if stop is not None:
            finish_reason, stop_reason = "stop", stop
        elif finish_reason is not None:
            held = self._text.flush()
            reasoning, content = reasoning + held[0], content + held[1]
        self._progress.thinking = self._progress.thinking and not self._text.answers
        await self._send(reasoning, content, finish_reason, stop_reason)

    async def _send(
        self,
        reasoning: str,
        content: str,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> None:
        delta = {name: text for name, text in (("reasoning", reasoning), ("content", content)) if text}
        if delta or finish_reason is not None:
            await self._reply.send(chunk_of(self._form, delta, finish_reason, stop_reason))
        self._finished = finish_reason is not None

    def _count(self, choice: dict[str, Any], text: bool) -> list[int]:
        """Count the tokens of a chunk, and return them. Raises EngineFailed if the engine gives the request up."""
        if choice.get("finish_reason") == "abort":
            raise EngineFailed("the engine aborted the request", broke=True)
        tokens: list[int] = choice.get("token_ids") or []
        self._progress.tokens += tokens
        if text:
            self._with_text = len(self._progress.tokens)
        return tokens

    async def _settle(self, url: str) -> None:
        """Drop the tokens whose text the client does not have, and send the text that an engine held back.

        A prompt must not end within a character, because vLLM then begins the answer with the whole prompt's text.
        """
        model, tokens = self._request.body.get("model"), self._progress.tokens
        if self._with_text == self._at_handover:
            del tokens[self._with_text :]
            self._unsettled = False
            return
        for kept in range(self._with_text, max(0, self._with_text - MAX_CUT_TOKENS), -1):
            full = await self._engines.text(url, model, tokens[:kept], self._headers)
            if full is None or not full.endswith(INCOMPLETE):
                break
        else:
            kept, full = self._with_text, None
        missing = self._text.missing(full) if full is not None and self._engine_text else ""
        if full is None or missing is None:
            logger.warning("request %s: %s does not tell the text of its tokens", self._form["id"], url)
        del tokens[kept:]
        self._with_text, self._unsettled = kept, False
        if missing:
            await self._feed(missing)

    async def _tokens_left(self, url: str) -> int:
        limit, done = self._request.max_tokens, len(self._progress.tokens)
        if self._continuation is not None and self._continuation.max_tokens is not None:
            # An engine may have a lower limit than the client asks for.
            limit = self._continuation.max_tokens
        if limit is not None:
            return limit - done
        source = url if self._home in self._failed else self._home
        model = self._request.body.get("model")
        return await self._engines.context_tokens(source, model, self._headers) - len(self._progress.prompt) - done

    def _transfer(self, url: str) -> dict[str, Any] | None:
        """Return the parameters with which an engine reads the KV; None if it must recompute."""
        now = self._continuation
        if now is None or url != now.url:
            return None
        return now.kv_transfer_params if time.monotonic() - self._handed_over_s < now.expires_ms / 2000 else None

    def _note_second_leg(self, url: str, transferred: bool) -> None:
        """Note which engine continues the request, once its first chunk has come."""
        if self._continuation is None:
            return
        if not self._gap_known:
            self._gap_known = True
            self._metrics.gap.observe(time.monotonic() - self._handed_over_s)
        if url == self._continuation.url:
            self.result = "handed_over" if transferred else "recomputed"
        else:
            self.result = "finished_on_thinking_engine"
