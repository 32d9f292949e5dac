"""Writes what a client gets: chunks as they come, or one object in the end, both in vLLM's form."""

from __future__ import annotations

import json
from contextlib import contextmanager
from io import StringIO
from typing import TYPE_CHECKING, Any

from aiohttp import web
from multidict import CIMultiDict

from meridian_relay.headers import OF_THE_BODY, READABLE, REQUEST_ID, passed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiohttp import web_request
    from multidict import MultiMapping

USAGE = (
    "prompt_tokens",
    "total_tokens",
    "completion_tokens",
    "prompt_tokens_details",
    "completion_tokens_details",
)


# OpenAI's error object as vLLM writes it.
NO_ENGINE: dict[str, Any] = {
    "error": {
        "message": "No engine could serve the request; the relay's log says why.",
        "type": "BadGatewayError",
        "param": None,
        "code": 502,
    }
}


class ClientGone(Exception):  # noqa: N818 - the name states the condition
    """The client has closed its connection, so that this response reaches nobody."""

    def __init__(self, response: web.StreamResponse) -> None:
        super().__init__()
        self.response = response


def json_text(value: dict[str, Any]) -> bytes:
    """Return JSON in vLLM's form. A half of a surrogate pair is valid JSON, but no text."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def json_response(value: dict[str, Any], status: int = 200, headers: CIMultiDict[str] | None = None) -> web.Response:
    return web.Response(body=json_text(value), status=status, headers=headers, content_type="application/json")


def no_engine(headers: CIMultiDict[str] | None = None) -> web.Response:
    """Return the response if no engine can serve a request."""
    return json_response(NO_ENGINE, 502, CIMultiDict({**(headers or {}), **READABLE}))


def chunk_of(
    form: dict[str, Any], delta: dict[str, str], finish_reason: str | None = None, stop_reason: int | str | None = None
) -> dict[str, Any]:
    """Return a chunk with an answer's next text. form: id, object, created and model of the answer."""
    choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    if finish_reason is not None:
        choice["stop_reason"] = stop_reason
    return {**form, "choices": [{**choice, "token_ids": None}]}


class StreamedReply:
    """Sends chunks to the client as server-sent events. Its methods raise ClientGone."""

    def __init__(self, request: web_request.Request, request_id: str, usage_wanted: bool) -> None:
        self._request, self._usage_wanted = request, usage_wanted
        self._response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", REQUEST_ID: request_id}
        )

    async def begin(self, headers: MultiMapping[str]) -> None:
        """Send the response's head, unless the client has it, with the headers of an engine's response that are not its
        body's. As with vLLM the client has it before the first token, however long that takes."""
        if not self.begun:
            self._response.headers.update(passed(headers, OF_THE_BODY))
            with self._to_client():
                await self._response.prepare(self._request)

    @property
    def begun(self) -> bool:
        """Whether the client has the response's head."""
        return self._response.prepared

    async def keep_alive(self) -> None:
        """Send the comment by which vLLM keeps proxies from closing an idle stream."""
        await self._write(b": keep-alive")

    async def send(self, chunk: dict[str, Any]) -> None:
        await self._write(b"data: " + json_text(chunk))

    async def end(self, usage: dict[str, Any]) -> web.StreamResponse:
        """End the stream after the usage chunk, if the client asked for it."""
        if self._usage_wanted:
            await self.send(usage)
        await self._write(b"data: [DONE]")
        return self._response

    async def fail(self) -> web.StreamResponse:
        """Return an error response, or end the stream with an error event if it has begun."""
        if not self.begun:
            return no_engine(CIMultiDict({REQUEST_ID: self._response.headers[REQUEST_ID]}))
        return await self.refuse(NO_ENGINE)

    async def refuse(self, event: dict[str, Any]) -> web.StreamResponse:
        """End the stream with an error event, as vLLM does if it finds the request wrong."""
        await self.send(event)
        await self._write(b"data: [DONE]")
        return self._response

    async def _write(self, event: bytes) -> None:
        with self._to_client():
            await self._response.write(event + b"\n\n")

    @contextmanager
    def _to_client(self) -> Iterator[None]:
        try:
            yield
        except ConnectionError as error:
            raise ClientGone(self._response) from error


class WholeReply:
    """Collects chunks and answers with one chat completion."""

    def __init__(self, request_id: str) -> None:
        self._request_id, self._headers = request_id, CIMultiDict({REQUEST_ID: request_id})
        self._form: dict[str, Any] = {}
        self._role = "assistant"
        self._text = {"reasoning": StringIO(), "content": StringIO()}
        self._ending: dict[str, Any] = {}

    async def begin(self, headers: MultiMapping[str]) -> None:
        """Give the response the headers of an engine's response that are not its body's."""
        self._headers.update(passed(headers, OF_THE_BODY))

    @property
    def begun(self) -> bool:
        """Whether the client has the response's head."""
        return False

    async def keep_alive(self) -> None:
        """Do nothing, because a response in one piece has no comments."""

    async def send(self, chunk: dict[str, Any]) -> None:
        choice = chunk["choices"][0]
        self._form = self._form or chunk
        self._role = choice["delta"].get("role") or self._role
        for name, text in self._text.items():
            text.write(choice["delta"].get(name) or "")
        if choice["finish_reason"] is not None:
            self._ending = choice

    async def end(self, usage: dict[str, Any]) -> web.StreamResponse:
        text = {name: buffer.getvalue() or None for name, buffer in self._text.items()}
        message = {"role": self._role, "content": text["content"]}
        message |= dict.fromkeys(("refusal", "annotations", "audio", "function_call"))
        choice = {
            "index": 0,
            "message": message | {"reasoning": text["reasoning"]},
            "logprobs": None,
            "finish_reason": self._ending["finish_reason"],
            "stop_reason": self._ending.get("stop_reason"),
            "token_ids": None,
            "routed_experts": None,
        }
        body = {
            "id": self._form["id"],
            "object": "chat.completion",
            "created": self._form["created"],
            "model": self._form["model"],
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": usage.get("system_fingerprint"),
            "usage": {name: usage["usage"].get(name) for name in USAGE},
        }
        body |= dict.fromkeys(("prompt_logprobs", "prompt_token_ids", "prompt_text"))
        body |= dict.fromkeys(("kv_transfer_params", "ec_transfer_params")) | {"metrics": usage.get("metrics")}
        return json_response(body, headers=self._headers)

    async def fail(self) -> web.StreamResponse:
        return no_engine(CIMultiDict({REQUEST_ID: self._request_id}))

    async def refuse(self, event: dict[str, Any]) -> web.StreamResponse:
        """Answer with the error of an engine's event and with its status, as vLLM does without a stream."""
        return json_response(event, event["error"]["code"], self._headers)
