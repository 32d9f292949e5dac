"""Provides a grpc.aio server that no call can bring down, as a workaround for a bug of grpcio, seen in version 1.85.3.

For a call to an unregistered method, grpcio's asyncio server decodes the path in the loop that accepts all calls. A
path that is not UTF-8 therefore ends the server, and the process goes on without a server. All methods of the control
plane are registered, so this module accepts all other calls itself and answers them with UNIMPLEMENTED, as grpcio does.
The module uses private parts of grpcio, because no public interface sees such a call, and every stranger can send one.
If these parts are missing or changed, the module uses grpcio's own server.
All code runs on the server's event loop.
"""

from __future__ import annotations

import asyncio
from inspect import signature
from typing import TYPE_CHECKING, Any

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server as aio_server

if TYPE_CHECKING:
    from collections.abc import Sequence

_AioServer: Any = cygrpc.AioServer
# Private functions of grpcio that this module calls, with their parameters.
_USED = {
    "_handle_rpc": ("method_name", "method_resolver", "interceptors", "rpc_state", "loop", "concurrency_exceeded"),
    "_schedule_rpc_coro": ("rpc_coro", "rpc_state", "loop", "method_name"),
}
_FITS = all(
    hasattr(cygrpc, name) and tuple(signature(getattr(cygrpc, name)).parameters) == parameters
    for name, parameters in _USED.items()
) and all(hasattr(_AioServer, name) for name in ("_make_request_call_future", "_request_call"))


def server(options: Sequence[tuple[str, Any]], interceptors: Sequence[grpc.aio.ServerInterceptor] = ()) -> Any:
    """Return a grpc.aio.Server for services whose methods are all registered, as generated code registers them."""
    if not _FITS:
        return grpc.aio.server(options=options, interceptors=interceptors)
    return _Server(options, interceptors)


async def begin_answer(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Send the headers before the first response. Raises CancelledError if the client has just left, or the server has
    just stopped: gRPC then raises an error of its own, because it has not cancelled the call yet."""
    try:
        await context.send_initial_metadata(())
    except grpc.aio.BaseError:
        raise asyncio.CancelledError from None


class _Server(aio_server.Server):
    def __init__(self, options: Sequence[tuple[str, Any]], interceptors: Sequence[grpc.aio.ServerInterceptor]) -> None:
        self._loop = cygrpc.get_working_loop()
        arguments = aio_server._augment_channel_arguments(options, None)
        self._server = _Accepting(self._loop, None, (), interceptors, arguments, None)


class _Accepting(_AioServer):  # type: ignore[misc]
    def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[Any]:
        """Return a future of the next call of a method; the future for unregistered methods (None) never completes."""
        if method is not None:
            return super()._make_request_call_future(method)  # type: ignore[no-any-return]
        return asyncio.get_running_loop().create_task(self._refuse_unknown())

    async def _refuse_unknown(self) -> None:
        """Answer calls of unregistered methods until the server stops; the await then raises, as grpcio expects."""
        loop, nothing = asyncio.get_running_loop(), cygrpc._MethodResolver([], {})
        answering: set[asyncio.Task[Any]] = set()
        while True:
            call = await self._request_call()
            answer = cygrpc._handle_rpc("", nothing, (), call, loop, False)
            task = loop.create_task(cygrpc._schedule_rpc_coro(answer, call, loop, ""))
            answering.add(task)
            task.add_done_callback(answering.discard)
