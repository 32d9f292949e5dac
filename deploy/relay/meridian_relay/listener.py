"""Serves an HTTP application to the hosts that are meant.

A web page of any origin may send requests to the listeners of its reader's machine, and reads the answers if its own
name resolves to that machine (DNS rebinding). Such a request names the page's own host, so a listener on loopback
answers only to names of this machine and to names that the operator gives. All code runs on the event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import os
import re
from typing import TYPE_CHECKING, Any

from aiohttp import HttpVersion11, web

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiohttp.typedefs import Handler

# Seconds in which a new connection must send the head of its request.
HEAD_S = 75.0
# New connections that wait until the event loop takes them, as many as at vLLM's server.
BACKLOG = 2048
# Seconds for connections whose requests have ended, as for the rest of a body that nobody reads.
STOP_S = 1.0
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:@/?#\s]+)(:\d+)?", re.IGNORECASE | re.ASCII)


class HttpListener:
    """An HTTP listener. `start` binds its address, and `stop` ends its connections once their requests have ended, and
    those of requests that are under way after drain_s seconds.

    further: host names that the operator gives. On loopback the names of this machine's loopback and the further names
    are answered. Elsewhere every name is answered if there are no further names; otherwise IP addresses, which no other
    site can have as its name, and the further names. options: those of aiohttp's AppRunner.
    """

    def __init__(self, app: web.Application, further: Iterable[str] = (), drain_s: float = 0.0, **options: Any) -> None:
        self._further = frozenset(map(host_name, further))
        self._on_loopback = False
        app.middlewares.append(self._checked)
        # aiohttp would let requests go on for twice this time, and for ever with 0, so `stop` ends them itself.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=drain_s + STOP_S, **options)
        self._drain_s = drain_s
        # True once the requests under way have been ended.
        self.is_cut = False
        # Requests under way, until their responses are written.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server | None = None
        # Connections that have not sent a whole head yet, each with the timer that ends it.
        self._due: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}

    async def start(self, host: str, port: int) -> int:
        """Bind the address and return the port; an empty host stands for all. Raises OSError if the address cannot be
        bound."""
        self._on_loopback = is_loopback(host)
        await self._runner.setup()
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._connection, host or None, port, backlog=BACKLOG
            )
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
            raise OSError(f"cannot listen on {host}:{port}: {reason}") from error
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        cut = asyncio.get_running_loop().call_later(self._drain_s, self.cut)
        await self._runner.cleanup()
        cut.cancel()
        for timer in self._due.values():
            timer.cancel()
        self._due.clear()

    def allows(self, host: str) -> bool:
        """Return whether a request with this Host header is answered."""
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found[1].strip("[]").lower().rstrip(".")
        if name in self._further or is_loopback(name):
            return True
        return not self._on_loopback and (not self._further or _address(name) is not None)

    def _connection(self) -> asyncio.Protocol:
        assert self._runner.server is not None
        protocol = self._runner.server()
        self._due[protocol] = asyncio.get_running_loop().call_later(HEAD_S, self._expire, protocol)
        return protocol

    def _expire(self, protocol: Any) -> None:
        del self._due[protocol]
        if protocol.transport is not None:
            protocol.transport.abort()

    def cut(self) -> None:
        """End the requests under way."""
        self.is_cut = True
        for task in self._tasks:
            task.cancel()

    @web.middleware
    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if (timer := self._due.pop(request.protocol, None)) is not None:
            timer.cancel()
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        hosts = request.headers.getall("Host", [])
        # HTTP/1.0, by which some load balancers check health, needs no Host. Where names matter it is refused.
        unnamed = not hosts and request.version < HttpVersion11 and not (self._on_loopback or self._further)
        if unnamed or (len(hosts) == 1 and self.allows(hosts[0])):
            return await handler(request)
        named = ", ".join(map(ascii, hosts))[:100] or "no host"
        text = f"this listener does not answer to {named}; --allow-host adds a name\n"
        return web.Response(status=421, text=text, headers={"X-Content-Type-Options": "nosniff"})


def host_name(text: str) -> str:
    """Return the name in a flag that adds one. Raises ArgumentTypeError for a name that no Host header can have without
    its port."""
    name, found = text.strip().lower(), _HOST.fullmatch(text.strip())
    if _address(name) is None and (found is None or found[2] or "*" in name):
        raise argparse.ArgumentTypeError(f"must be one host name or address, without scheme, port or *; got {text!r}")
    return name.strip("[]").rstrip(".")


def flag_address(flag: str, address: str) -> tuple[str, int]:
    """Split `host:port` or `:port` into host and port. Raises ValueError, which names the flag."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{flag}: an address must be host:port or :port; got {address!r}")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Return whether a name or an IP address stands for this machine and only programs on it can reach it."""
    address = _address(host)
    if address is None:
        return host == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
