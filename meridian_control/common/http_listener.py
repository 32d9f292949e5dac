"""Serves an HTTP application to the hosts that are meant, on connections that cost little and end.

A web page of any origin may send requests to the listeners of its reader's machine, and reads the answers if its own
name resolves to that machine (DNS rebinding). Such a request names the page's own host, so a listener on loopback
answers only to names of this machine and to names that the operator gives. The module knows nothing of the
application. All code runs on the event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import os
import re
from typing import TYPE_CHECKING, Any

from aiohttp import web

from meridian_control.common.addresses import is_loopback

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiohttp.typedefs import Handler

# Seconds in which a new connection must send the head of its request, and in which a client must read a response.
HEAD_S, READ_S = 10.0, 30.0
# Seconds for which `stop` waits for responses under way, whose clients may read nothing.
STOP_S = 2.0
# Largest number of connections of a listener.
MAX_CONNECTIONS = 256
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:@/?#\s]+)(:\d+)?", re.IGNORECASE | re.ASCII)


def host_name(text: str) -> str:
    """Return the name in a flag that adds one. Raises ArgumentTypeError for a name that no Host header can have without
    its port."""
    name_text = text.strip()
    if _is_address(name_text):
        return name_text.lower()
    match = _HOST.fullmatch(name_text)
    if (name := _name(name_text)) is None or (match and match[2]) or "*" in name:
        raise argparse.ArgumentTypeError(f"must be one host name or address, without scheme, port or *; got {text!r}")
    return name


class Hosts:
    """The names under which a listener may be asked.

    listen: the host that the listener binds, empty for all. further: names that the operator gives. On loopback the
    names of this machine's loopback and the further names are allowed. Elsewhere every name is allowed if there are no
    further names; otherwise IP addresses, which no other site can have as its name, and the further names.
    """

    def __init__(self, listen: str, further: Iterable[str] = ()) -> None:
        self._loopback = is_loopback(listen)
        self._further = frozenset(map(host_name, further))

    def allows(self, host: str) -> bool:
        """Return whether a request with this Host header is answered."""
        if (name := _name(host)) is None:
            return False
        if name in self._further or is_loopback(name):
            return True
        return not self._loopback and (not self._further or _is_address(name))

    def allows_origin(self, origin: str, host: str) -> bool:
        """Return whether a page of this Origin may read what the listener says under a Host header."""
        scheme, _, named = origin.partition("://")
        return scheme in ("http", "https") and (named.lower() == host.lower() or _name(named) in self._further)


class HttpListener:
    """An HTTP listener. `start` binds its address, and `stop` ends its connections.

    The application's responses are short or limit themselves, and only the application's own pages may read them.
    hosts: further names under which it may be asked.
    """

    def __init__(self, app: web.Application, hosts: Iterable[str] = ()) -> None:
        self._further = tuple(hosts)
        app.middlewares.append(self._checked)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_S)
        self._server: asyncio.Server | None = None
        # Connections that must do something within a time, each with the timer that ends it.
        self._due: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}

    async def start(self, host: str, port: int) -> int:
        """Bind the address and return the port; an empty host stands for all. Raises OSError if the address cannot be
        bound."""
        self._hosts = Hosts(host, self._further)
        await self._runner.setup()
        try:
            self._server = await asyncio.get_running_loop().create_server(self._connection, host or None, port)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
            raise OSError(f"cannot listen on {host}:{port}: {reason}") from error
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()
        for timer in self._due.values():
            timer.cancel()
        self._due.clear()

    def _connection(self) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        assert self._runner.server is not None
        if len(self._runner.server.connections) >= MAX_CONNECTIONS:
            return _Refusal()
        protocol = self._runner.server()
        self._expect(protocol, HEAD_S)
        return protocol

    def _expect(self, protocol: asyncio.Protocol, seconds: float) -> None:
        """End a connection after this time, unless its next request begins first."""
        self._due[protocol] = asyncio.get_running_loop().call_later(seconds, self._expire, protocol)

    def _expire(self, protocol: Any) -> None:
        del self._due[protocol]
        if protocol.transport is not None:
            protocol.transport.abort()

    @web.middleware
    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request if its client may ask; the time for its head is over."""
        if (timer := self._due.pop(request.protocol, None)) is not None:
            timer.cancel()
        try:
            if refusal := self._refusal(request):
                return refusal
            return await handler(request)
        finally:
            if request.transport is not None:
                self._expect(request.protocol, READ_S)

    def _refusal(self, request: web.Request) -> web.Response | None:
        hosts = request.headers.getall("Host", [])
        if len(hosts) != 1 or not self._hosts.allows(hosts[0]):
            names = ", ".join(map(ascii, hosts))[:100] or "no host"
            return _refused(421, f"this listener does not answer to {names}; --allow-host adds a name")
        origin = request.headers.get("Origin")
        # Browsers name no origin in requests for images and scripts, but say that the request comes from another site.
        foreign = request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site")
        followed = request.headers.get("Sec-Fetch-Mode") == "navigate"
        if (origin is not None and not self._hosts.allows_origin(origin, hosts[0])) or (foreign and not followed):
            return _refused(403, "pages of other sites may not read this")
        return None


class _Refusal(asyncio.Protocol):
    """Ends a connection at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def _refused(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=f"{text}\n", headers={"X-Content-Type-Options": "nosniff"})


def _name(host: str) -> str | None:
    """Return the name in a Host header or an origin, in lower case and without its port; None if it is malformed."""
    match = _HOST.fullmatch(host)
    return match[1].strip("[]").lower().rstrip(".") if match else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
