"""The usual `grpc_server_*` metrics, counted by an interceptor of the gRPC server.

The module knows nothing of the services. The module runs on the server's event loop. Calls of unknown methods are not
counted, because the caller chooses their names and could create any number of series.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any

import grpc
from prometheus_client import Counter, Histogram

from meridian_control.telemetry.catalogue import CATALOGUE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from prometheus_client.registry import CollectorRegistry

    Handler = grpc.RpcMethodHandler[Any, Any]

# The key says whether requests and whether responses are streams. The value has the handler's attribute, the metric
# label, and the function that makes such a handler.
SHAPES = {
    (False, False): ("unary_unary", "unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", "server_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", "client_stream", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", "bidi_stream", grpc.stream_stream_rpc_method_handler),
}


class ServerMetrics(grpc.aio.ServerInterceptor):
    """Counts the server's calls. Must be the first interceptor, so that calls that a later one refuses count too."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def metric(kind: Any, name: str) -> Any:
            entry = CATALOGUE[name]
            return kind(name, entry.text, entry.labels, registry=registry)

        self.started = metric(Counter, "grpc_server_started_total")
        self.handled = metric(Counter, "grpc_server_handled_total")
        self.received = metric(Counter, "grpc_server_msg_received_total")
        self.sent = metric(Counter, "grpc_server_msg_sent_total")
        self.seconds = metric(Histogram, "grpc_server_handling_seconds")

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Handler | None]], details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(details)
        if handler is None:
            return None
        attribute, kind, make = SHAPES[bool(handler.request_streaming), bool(handler.response_streaming)]
        _, service, method = details.method.split("/")
        call = _Method(self, getattr(handler, attribute), handler.request_streaming, (kind, service, method))
        behaviour = call.stream if handler.response_streaming else call.single
        return make(behaviour, handler.request_deserializer, handler.response_serializer)


class _Method:
    """Wraps the `behaviour` that serves one method, and counts its calls and messages."""

    def __init__(
        self, metrics: ServerMetrics, behaviour: Any, request_streaming: bool, labels: tuple[str, str, str]
    ) -> None:
        self._metrics, self._labels, self._request_streaming = metrics, labels, request_streaming
        self._behaviour = behaviour
        self._received, self._sent = metrics.received.labels(*labels), metrics.sent.labels(*labels)

    async def single(self, request: Any, context: Any) -> Any:
        with self._call(context):
            response = await self._behaviour(self._requests(request), context)
            self._sent.inc()
            return response

    async def stream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Serve a streaming response. Count each message that the handler yields or writes to the context."""
        with self._call(context):
            if not inspect.isasyncgenfunction(self._behaviour):
                await self._behaviour(self._requests(request), _Writing(context, self._sent))
                return
            async with aclosing(self._behaviour(self._requests(request), context)) as responses:
                async for response in responses:
                    self._sent.inc()
                    yield response

    def _requests(self, request: Any) -> Any:
        if self._request_streaming:
            return _Reading(request, self._received)
        self._received.inc()
        return request

    @contextmanager
    def _call(self, context: Any) -> Iterator[None]:
        self._metrics.started.labels(*self._labels).inc()
        began, code = time.perf_counter(), "UNKNOWN"
        try:
            yield
            code = _code(context)
        except (asyncio.CancelledError, GeneratorExit):
            code = "CANCELLED"
            raise
        except grpc.aio.AbortError:
            code = _code(context)
            raise
        finally:
            self._metrics.handled.labels(*self._labels, code).inc()
            self._metrics.seconds.labels(*self._labels).observe(time.perf_counter() - began)


class _Reading:
    """Iterates over the messages of a stream and counts them. The class is no generator, because a generator would add
    a cost to every report of an engine."""

    def __init__(self, messages: AsyncIterator[Any], received: Any) -> None:
        self._next, self._received = aiter(messages).__anext__, received

    def __aiter__(self) -> _Reading:
        return self

    async def __anext__(self) -> Any:
        message = await self._next()
        self._received.inc()
        return message


class _Writing:
    """A call's context that counts the messages written to it."""

    def __init__(self, context: Any, sent: Any) -> None:
        self._context, self._sent = context, sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        await self._context.write(message)
        self._sent.inc()


def _code(context: Any) -> str:
    """Return the status with which a call ends. The status is OK if the handler has not set a status."""
    code = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return next((known.name for known in grpc.StatusCode if known.value[0] == code), "OK")
