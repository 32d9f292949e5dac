"""The usual `grpc_server_*` metrics, counted by an interceptor of the gRPC server.

No library counts them on a grpc.aio server: OpenTelemetry's gRPC instrumentation has traces only, and
grpcio-observability does not see the calls of grpc.aio. Calls of unknown methods are not counted, because the caller
chooses their names and could create any number of series. The module runs on the server's event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any

import grpc
from prometheus_client import Counter, Histogram

from meridian_control.telemetry.catalogue import SERVER

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from prometheus_client.registry import CollectorRegistry

# The names of statuses, which a context gives as numbers or as such, and the label of a method by whether requests and
# whether responses are streams.
STATUSES: dict[Any, str] = {key: code.name for code in grpc.StatusCode for key in (code, code.value[0])}
TYPES = {(0, 0): "unary", (0, 1): "server_stream", (1, 0): "client_stream", (1, 1): "bidi_stream"}


class ServerMetrics(grpc.aio.ServerInterceptor):
    """Counts the server's calls. Must be the first interceptor, so that calls that a later one refuses count too."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def metric(name: str, kind: Any = Counter) -> Any:
            (entry,) = (entry for entry in SERVER if entry.name == name)
            return kind(name, entry.text, entry.labels, registry=registry)

        self._started, self._handled = metric("grpc_server_started_total"), metric("grpc_server_handled_total")
        self._received, self._sent = metric("grpc_server_msg_received_total"), metric("grpc_server_msg_sent_total")
        self._seconds = metric("grpc_server_handling_seconds", Histogram)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        streams = bool(handler.request_streaming), bool(handler.response_streaming)
        attribute = "_".join("stream" if is_stream else "unary" for is_stream in streams)
        serve, labels = getattr(handler, attribute), (TYPES[streams], *details.method.split("/")[1:])
        received, sent = self._received.labels(*labels), self._sent.labels(*labels)

        def counted(request: Any, context: Any) -> Any:
            if handler.request_streaming:
                return _Counted(context, received)
            received.inc()
            return request

        async def single(request: Any, context: Any) -> Any:
            with self._call(labels, context):
                response = await serve(counted(request, context), context)
                sent.inc()
                return response

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            with self._call(labels, context):
                if not inspect.isasyncgenfunction(serve):
                    # grpc's own health service writes to the context instead, uncounted.
                    await serve(counted(request, context), context)
                    return
                async with aclosing(serve(counted(request, context), context)) as responses:
                    async for response in responses:
                        sent.inc()
                        yield response

        make = getattr(grpc, f"{attribute}_rpc_method_handler")
        behaviour = stream if handler.response_streaming else single
        return make(behaviour, handler.request_deserializer, handler.response_serializer)

    @contextmanager
    def _call(self, labels: tuple[str, ...], context: Any) -> Iterator[None]:
        self._started.labels(*labels).inc()
        began, code = time.perf_counter(), "UNKNOWN"
        try:
            yield
            code = STATUSES.get(context.code(), "OK")
        except (asyncio.CancelledError, GeneratorExit, grpc.aio.AbortError) as error:
            code = STATUSES.get(context.code(), "OK") if isinstance(error, grpc.aio.AbortError) else "CANCELLED"
            raise
        finally:
            self._handled.labels(*labels, code).inc()
            self._seconds.labels(*labels).observe(time.perf_counter() - began)


class _Counted:
    """The requests of a stream, counted. The class is no generator, because a generator would add a cost to every
    report of an engine; and it does not use grpc's own generator, which keeps each message until the next has come."""

    def __init__(self, context: Any, counter: Any) -> None:
        self._read, self._counter = context.read, counter

    def __aiter__(self) -> _Counted:
        return self

    async def __anext__(self) -> Any:
        """Return the next request. Raises CancelledError if the call is over, also if the server stopped as the call
        began: gRPC has not cancelled it then, and raises an error of its own."""
        try:
            message = await self._read()
        except grpc.aio.BaseError:
            raise asyncio.CancelledError from None
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        self._counter.inc()
        return message
