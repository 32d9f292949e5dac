"""A server of grpc.aio that no call can end.

Owns the way round a fault of grpcio's, seen in 1.85: its asyncio server decodes the path of a call to a method that
nobody has registered in the loop that accepts all calls, so that one path which is not UTF-8 ends the server, and the
process goes on without it. Every method of ours is registered. So the calls to all others are taken here, and answered
with UNIMPLEMENTED as grpcio answers them, whatever their path is. Uses parts of grpcio that are not public, and where
they are missing or others leaves grpcio as it is. Runs on the server's event loop.
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
# The functions of grpcio that are called here, with their parameters.
_USED = {
    "_handle_rpc": ("method_name", "method_resolver", "interceptors", "rpc_state", "loop", "concurrency_exceeded"),
    "_schedule_rpc_coro": ("rpc_coro", "rpc_state", "loop", "method_name"),
}
_FITS = all(
    hasattr(cygrpc, name) and tuple(signature(getattr(cygrpc, name)).parameters) == parameters
    for name, parameters in _USED.items()
) and all(hasattr(_AioServer, name) for name in ("_make_request_call_future", "_request_call"))


def server(options: Sequence[tuple[str, Any]], interceptors: Sequence[grpc.aio.ServerInterceptor] = ()) -> Any:
    """A grpc.aio.Server, for services whose methods are all registered, as generated code registers them."""
    if not _FITS:
        return grpc.aio.server(options=options, interceptors=interceptors)
    return _Server(options, interceptors)


class _Server(aio_server.Server):
    def __init__(self, options: Sequence[tuple[str, Any]], interceptors: Sequence[grpc.aio.ServerInterceptor]) -> None:
        self._loop = cygrpc.get_working_loop()
        arguments = aio_server._augment_channel_arguments(options, None)
        self._server = _Accepting(self._loop, None, (), interceptors, arguments, None)


class _Accepting(_AioServer):  # type: ignore[misc]
    def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[Any]:
        """The next call of a method; of None for those that nobody has registered, which never comes."""
        if method is not None:
            return super()._make_request_call_future(method)  # type: ignore[no-any-return]
        return asyncio.get_running_loop().create_task(self._refuse_unknown())

    async def _refuse_unknown(self) -> None:
        """Answer calls of unknown methods, until the server stops: then what is awaited raises what grpcio expects."""
        loop, nothing = asyncio.get_running_loop(), cygrpc._MethodResolver([], {})
        answering: set[asyncio.Task[Any]] = set()
        while True:
            call = await self._request_call()
            answer = cygrpc._handle_rpc("", nothing, (), call, loop, False)
            task = loop.create_task(cygrpc._schedule_rpc_coro(answer, call, loop, ""))
            answering.add(task)
            task.add_done_callback(answering.discard)
