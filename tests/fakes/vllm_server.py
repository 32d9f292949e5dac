"""vLLM's OpenAI server over a scripted output: real HTTP on loopback, vLLM's chunk formats, no model.

The next token depends on the tokens before it alone, as with greedy sampling, so that any engine with the same script
continues a request alike. The text of tokens follows vLLM's incremental detokenizer: it waits for whole characters and
for stop strings, and begins with the whole prompt's text if the prompt ends within a character.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from multidict import CIMultiDictProxy

PROMPT, END, EOS, FIRST = [7, 8, 9], 1, 2, 100
MARKER = "</think>"
CONTEXT = 200
# A header that vLLM's server gives each response to a web page.
CORS = {"Access-Control-Allow-Origin": "*"}


class Script:
    """The output of every request: thinking, the end marker, an answer, the end of the sequence.

    Each piece is the bytes of one token. Equal pieces have equal ids.
    """

    def __init__(self, thinking: Sequence[bytes], answer: Sequence[bytes]) -> None:
        pieces = list(dict.fromkeys([*thinking, *answer]))
        ids = {piece: FIRST + index for index, piece in enumerate(pieces)}
        self.text = {END: MARKER.encode(), EOS: b"<|im_end|>"} | {token: piece for piece, token in ids.items()}
        self.text |= dict.fromkeys(PROMPT, b"user ")
        self.tokens = [*(ids[piece] for piece in thinking), END, *(ids[piece] for piece in answer), EOS]

    def decode(self, tokens: Sequence[int], specials: bool = True) -> str:
        data = b"".join(self.text[token] for token in tokens if specials or token != EOS)
        return data.decode("utf-8", "replace")

    def after(self, prompt: Sequence[int]) -> list[int] | None:
        """Return the tokens that follow a prompt; None if no engine with this script can have written it."""
        done = list(prompt[len(PROMPT) :])
        if list(prompt[: len(PROMPT)]) != PROMPT or done != self.tokens[: len(done)]:
            return None
        return self.tokens[len(done) :]


class Detokenizer:
    """The text of tokens as vLLM's FastIncrementalDetokenizer gives it. As with the agent, stop strings of a chat sleep
    while it thinks."""

    def __init__(self, script: Script, prompt: Sequence[int], body: dict[str, Any], chat: bool) -> None:
        self._script, self._specials = script, not body.get("skip_special_tokens", True)
        self._ids = list(prompt)
        known = script.decode(prompt, self._specials)
        self._prefix = "" if known.endswith("\ufffd") else known
        stop = body.get("stop") or []
        self._stops = [stop] if isinstance(stop, str) else stop
        self._include = body.get("include_stop_str_in_output", False)
        self._held = 0 if self._include or not self._stops else max(map(len, self._stops)) - 1
        self._output, self._sent = "", 0
        chat = chat or body.get("vllm_xargs", {}).get("meridian_chat") == 1
        # Whether stop strings sleep, and the length of the text in which they slept.
        self._asleep, self._begin = chat and END not in prompt, 0

    def add(self, token: int) -> str | None:
        """Take a token and return the stop string that its text completes, if any."""
        self._ids.append(token)
        text = self._script.decode(self._ids, self._specials)
        if len(text) <= len(self._prefix) or text.endswith("\ufffd"):
            return None
        self._output += text[len(self._prefix) :]
        self._prefix = text
        if self._asleep:
            self._asleep, self._begin = token != END, len(self._output)
            return None
        found = [(at + len(stop), stop) for stop in self._stops if (at := self._output.find(stop, self._begin)) >= 0]
        if not found:
            return None
        end, stop = min(found, key=lambda each: each[0])
        self._output = self._output[: end if self._include else end - len(stop)]
        return stop

    def delta(self, finished: bool) -> str:
        end = len(self._output) if finished else len(self._output) - self._held
        text = self._output[self._sent : max(end, self._sent)]
        self._sent += len(text)
        return text


@dataclass
class Delta:
    """A chunk's tokens with their text, and the reasons at the end."""

    tokens: list[int]
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class Plan:
    """The course of one generation. sizes: numbers of tokens per chunk, again and again. breaks_after: the connection
    closes after so many tokens, None for never. aborts: the engine then ends the request itself, as at a shutdown.
    handover: the stop_reason with which thinking ends, None to go on. waits_after: the engine pauses after so many
    tokens until `World.go`. status: an error status instead of a stream."""

    sizes: Sequence[int] = (1,)
    breaks_after: int | None = None
    aborts: bool = False
    handover: str | int | None = None
    waits_after: int | None = None
    status: int | None = None
    event: int | None = None
    idles: bool = False


@dataclass
class FakeVllm:
    """One engine. plans: a plan for each of the next generations, then the plan `usual`. seen: path and body of each
    request. gone: set when a client has left during a generation. cuts_at_marker: the parser cuts the chunk that ends
    with an invisible end marker at a wrong place, as vLLM's basic parsers do."""

    script: Script
    usual: Plan = field(default_factory=Plan)
    plans: deque[Plan] = field(default_factory=deque)
    seen: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    headers: list[CIMultiDictProxy[str]] = field(default_factory=list)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    detokenizes: bool = True
    context_tokens: int = CONTEXT
    cuts_at_marker: bool = False
    url: str = ""

    async def start(self) -> FakeVllm:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/echo/{rest:.*}", self._echo)
        self._runner = web.AppRunner(app, handler_cancellation=True, auto_decompress=False, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "max_model_len": self.context_tokens}]})

    async def _detokenize(self, request: web.Request) -> web.Response:
        if not self.detokenizes:
            raise web.HTTPNotFound
        return web.json_response({"prompt": self.script.decode((await request.json())["tokens"])})

    async def _echo(self, request: web.Request) -> web.StreamResponse:
        """Answer with the request's method, target, headers and body, in several parts."""
        body = await request.read()
        response = web.StreamResponse(status=418, headers={"X-Two": "a", "Content-Type": "text/odd"})
        response.headers.add("X-Two", "b")
        await response.prepare(request)
        headers = sorted((name.lower(), value) for name, value in request.headers.items())
        await response.write(json.dumps([request.method, request.raw_path, headers]).encode() + b"\n")
        await response.write(body)
        return response

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if request.content_type != "application/json":
            return web.json_response({"error": {"message": "Unsupported Media Type"}}, status=400)
        body = await request.json()
        self.seen.append((request.path, body))
        self.headers.append(request.headers)
        plan = self.plans.popleft() if self.plans else self.usual
        chat = request.path == "/v1/chat/completions"
        prompt = list(PROMPT) if chat else body["prompt"]
        left = self.script.after(prompt)
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or self.context_tokens - len(prompt)
        if plan.status is not None or left is None or len(prompt) + limit > self.context_tokens:
            headers = CORS | ({"Location": "/v1/models"} if plan.status in range(300, 400) else {})
            headers |= {"Retry-After": "7"} if plan.status == 503 else {}
            return web.json_response({"error": {"message": "refused"}}, status=plan.status or 400, headers=headers)
        if plan.event is not None:
            return _wrong(plan.event, body)
        form = _form(chat, request.headers.get("X-Request-Id", "none"))
        writer = _Writer(form, chat, body, len(prompt), self.cuts_at_marker)
        deltas = self._deltas(Detokenizer(self.script, prompt, body, chat), left, limit, body, plan)
        if not body.get("stream"):
            text = json.dumps(writer.whole(list(deltas)), ensure_ascii=False, separators=(",", ":"))
            return web.Response(body=text.encode(), content_type="application/json", headers=CORS)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"} | CORS)
        await response.prepare(request)
        try:
            await self._stream(response, writer, deltas, plan, prompt)
        except (asyncio.CancelledError, ConnectionError):
            self.gone.set()
            raise
        if plan.breaks_after is not None and not writer.finished and request.transport is not None:
            request.transport.close()
        return response

    async def _stream(
        self, response: web.StreamResponse, writer: _Writer, deltas: Iterator[Delta], plan: Plan, prompt: list[int]
    ) -> None:
        async def send(chunk: dict[str, Any] | str) -> None:
            if plan.idles:
                await response.write(b": keep-alive\n\n")
            data = chunk if isinstance(chunk, str) else json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
            await response.write(f"data: {data}\n\n".encode())

        if plan.breaks_after == 0 and not plan.aborts:
            if plan.idles:
                await response.write(b": keep-alive\n\n")
            return
        for chunk in writer.begin(prompt):
            await send(chunk)
        done = 0
        for delta in deltas:
            for chunk in writer.chunk(delta, prompt):
                await send(chunk)
            done += len(delta.tokens)
            if plan.waits_after is not None and done >= plan.waits_after:
                self.waiting.set()
                await self.go.wait()
        if writer.finished:
            if writer.wants_usage:
                await send(writer.usage())
            await send("[DONE]")

    def _deltas(
        self, text: Detokenizer, left: list[int], limit: int, body: dict[str, Any], plan: Plan
    ) -> Iterator[Delta]:
        """Yield the chunks of a generation until its end or until the plan breaks it."""
        held, sizes = list[int](), 0
        wants = body.get("vllm_xargs", {}).get("meridian_handover_candidate") == 1
        for done, token in enumerate(left):
            if plan.breaks_after == done:
                if held or plan.aborts:
                    yield Delta(held, text.delta(plan.aborts), "abort" if plan.aborts else None)
                return
            held.append(token)
            ending: tuple[str, str | int | None] | None = None
            if token == EOS:
                ending = "stop", None
            elif token == END and wants and plan.handover is not None:
                ending = "stop", plan.handover
            elif (stop := text.add(token)) is not None:
                ending = "stop", stop
            elif done + 1 == limit:
                ending = "length", None
            if ending is not None:
                yield Delta(held, text.delta(True), *ending)
                return
            if len(held) >= plan.sizes[sizes % len(plan.sizes)]:
                yield Delta(held, text.delta(False))
                held, sizes = [], sizes + 1


def _wrong(code: int, body: dict[str, Any]) -> web.Response:
    """Return the answer to a request in which vLLM finds a fault after it has begun to answer."""
    error = {"error": {"message": "out-of-vocab", "type": "BadRequestError", "param": "logit_bias", "code": code}}
    if not body.get("stream"):
        return web.json_response(error, status=code, headers=CORS)
    text = f"data: {json.dumps(error)}\n\ndata: [DONE]\n\n"
    return web.Response(text=text, content_type="text/event-stream", headers=CORS)


def _form(chat: bool, request_id: str) -> dict[str, Any]:
    if chat:
        return {"id": f"chatcmpl-{request_id}", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return {"id": f"cmpl-{request_id}", "object": "text_completion", "created": 2, "model": "m"}


class _Writer:
    """Writes the chunks of a generation in the form of vLLM 0.32."""

    def __init__(self, form: dict[str, Any], chat: bool, body: dict[str, Any], prompt: int, cuts: bool) -> None:
        self._form, self._chat, self._ids, self._cuts = form, chat, body.get("return_token_ids"), cuts
        self.wants_usage = (body.get("stream_options") or {}).get("include_usage")
        self._raw, self._said, self._tokens, self._prompt = "", ("", ""), list[int](), prompt
        self.finished = False

    def begin(self, prompt: list[int]) -> Iterator[dict[str, Any]]:
        """Yield the chunk with the role, which comes before the first token."""
        if self._chat:
            delta = {"role": "assistant", "content": ""}
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
            ids = prompt if self._ids else None
            yield {**self._form, "choices": [choice], "prompt_token_ids": ids, "prompt_text": None}

    def chunk(self, delta: Delta, prompt: list[int]) -> Iterator[dict[str, Any]]:
        first = not self._tokens
        self._tokens += delta.tokens
        self.finished = delta.finish_reason is not None
        ids = delta.tokens if self._ids else None
        choice: dict[str, Any] = {"index": 0}
        if not self._chat:
            choice |= {"text": delta.text, "logprobs": None, "finish_reason": delta.finish_reason}
            choice |= {"stop_reason": delta.stop_reason, "prompt_token_ids": prompt if first and self._ids else None}
            yield {**self._form, "choices": [{**choice, "token_ids": ids}]}
            return
        said = self._parsed(delta)
        if said or ids is not None or self.finished:
            choice |= {"delta": said, "logprobs": None, "finish_reason": delta.finish_reason}
            if self.finished:
                choice["stop_reason"] = delta.stop_reason
            yield {**self._form, "choices": [{**choice, "token_ids": ids}]}

    def _parsed(self, delta: Delta) -> dict[str, str]:
        if self._cuts and len(delta.tokens) > 1 and delta.tokens[-1] == END and self.finished:
            at = delta.text.find(MARKER)
            reasoning, content = delta.text[:at], delta.text[at + len(MARKER) :]
        else:
            self._raw += delta.text
            thought, mark, answer = self._raw.partition(MARKER)
            if not (mark or self.finished):
                # A marker may have begun at the end of the text.
                parts = (n for n in range(len(MARKER) - 1, 0, -1) if thought.endswith(MARKER[:n]))
                thought = thought[: len(thought) - next(parts, 0)]
            reasoning, content = thought[len(self._said[0]) :], answer[len(self._said[1]) :]
            self._said = thought, answer
        return {name: text for name, text in (("reasoning", reasoning), ("content", content)) if text}

    def _usage(self) -> dict[str, Any]:
        done = len(self._tokens)
        usage: dict[str, Any] = {"prompt_tokens": self._prompt, "total_tokens": self._prompt + done}
        usage["completion_tokens"] = done
        if self._chat:
            thought = self._tokens.index(END) if END in self._tokens else done
            usage["completion_tokens_details"] = {"reasoning_tokens": thought}
        return usage

    def usage(self) -> dict[str, Any]:
        return {**self._form, "choices": [], "usage": self._usage(), "system_fingerprint": "fake"}

    def whole(self, deltas: list[Delta]) -> dict[str, Any]:
        """Return the chat completion of all chunks, with every field that vLLM's answer has."""
        text = {"reasoning": "", "content": ""}
        for delta in deltas:
            self._tokens += delta.tokens
            self.finished = delta.finish_reason is not None
            for name, part in self._parsed(delta).items():
                text[name] += part
        message = {"role": "assistant", "content": text["content"] or None, "refusal": None, "annotations": None}
        message |= {"audio": None, "function_call": None, "reasoning": text["reasoning"] or None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": deltas[-1].finish_reason}
        choice |= {"stop_reason": deltas[-1].stop_reason, "token_ids": None, "routed_experts": None}
        usage = self._usage()
        details = usage.pop("completion_tokens_details")
        usage |= {"prompt_tokens_details": None, "completion_tokens_details": details}
        body = {**self._form, "object": "chat.completion", "choices": [choice], "service_tier": None}
        body |= {"system_fingerprint": "fake", "usage": usage}
        body |= dict.fromkeys(("prompt_logprobs", "prompt_token_ids", "prompt_text"))
        return body | dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "metrics"))
