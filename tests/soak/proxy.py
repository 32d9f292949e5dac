"""The connection from the engine to the control plane, which can be slow, cut, dead or closed.

The proxy runs on the soak's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

CHUNK_BYTES = 1 << 16


class Proxy:
    """Listens on one port of this machine and passes the data on to another port.

    delay_s: delay of each piece in either direction. refuses: whether the port is closed. `die` leaves connections open
    but lets no data through them.
    """

    def __init__(self, port: int, target_port: int) -> None:
        self.port, self._target_port = port, target_port
        self.delay_s = 0.0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._dead: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None] | None] = set()

    async def open(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, reuse_address=True)

    async def close(self) -> None:
        """Stop listening and reset all connections."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()

    async def end(self) -> None:
        """Close for good, so that no task is left."""
        await self.close()
        await asyncio.gather(*filter(None, self._serving), return_exceptions=True)

    def cut(self) -> None:
        """Reset all connections."""
        for writer in self._writers:
            writer.transport.abort()

    def die(self) -> None:
        """Let no more data through the open connections, without closing them."""
        self._dead |= self._writers

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.add(task := asyncio.current_task())
        try:
            await self._pass_on(reader, writer)
        finally:
            self._serving.discard(task)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            onward_reader, onward = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, onward}
        self._writers |= both
        try:
            pumps = {asyncio.create_task(self._pump(*way)) for way in ((reader, onward), (onward_reader, writer))}
            _, others = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for other in others:
                other.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            self._writers -= both
            self._dead -= both
            for one in both:
                one.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Any:
        with contextlib.suppress(OSError):
            while piece := await reader.read(CHUNK_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if writer not in self._dead:
                    writer.write(piece)
                    await writer.drain()
