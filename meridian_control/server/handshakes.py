"""Logs the address of a client that connects to the TLS port and leaves without a call, which gRPC does not report.

gRPC asks for the server's credentials before each TLS handshake, on threads of its own, but says neither who the client
is nor how the handshake ends. So the module looks at the process's own TCP connections when a handshake begins, and
again some seconds later: a connection that has ended without a call did not come from a gRPC client that passed TLS.
Only gRPC's core and the client's own log know the cause. The look needs Linux, and is limited in rate, so that a
thousand engines that come back at once cost little: then some clients are not looked at.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import time
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING
from urllib.parse import unquote

from meridian_control.server.rate_limits import Rate

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

FILES = "/proc/self/fd"
# Host and port of a client.
Address = tuple[str, int]

# Looks per second in the long run, and looks in one burst.
LOOKS = (2.0, 10)
# Seconds after the begin of its handshake within which a client makes its first call.
WAIT_S = 5.0
# Seconds in which the log has one line about a host, and the number of hosts and of callers that are remembered.
QUIET_S, REMEMBERED = 600.0, 4096
TEXT = (
    "%s connected to the TLS port and left without a call%s: its TLS handshake failed, or it tried none. It needs "
    "TLS (--ca or MERIDIAN_TLS_CA, with the CA of --tls-cert) and, with --client-ca, a valid certificate of that CA "
    "(--cert and --key, or MERIDIAN_TLS_CERT and MERIDIAN_TLS_KEY); its own log names the cause"
)


class Handshakes:
    """`begun` runs on gRPC's threads; everything else runs on the event loop. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rate = Rate(*LOOKS, clock())
        self._port = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: set[Address] = set()
        # Clients that have made a call, those seen last at the end.
        self._callers: dict[Address, None] = {}
        # By host the time of the newest line and the number of clients that left since then.
        self._logged: dict[str, tuple[float, int]] = {}

    def watch(self, port: int) -> None:
        """Begin to look at clients of this port of the process."""
        self._loop, self._port = asyncio.get_running_loop(), port

    def begun(self) -> None:
        """Note that a handshake begins. Never raises."""
        with suppress(Exception):
            if self._loop is not None and not self._rate.wait_s(self._clock()):
                self._loop.call_soon_threadsafe(self._note, clients_of(self._port))

    def called(self, peer: str) -> None:
        """Note that a client makes a call. peer: as gRPC names it."""
        if self._loop is None or (address := address_of(peer)) is None:
            return
        self._waiting.discard(address)
        self._remember(address)

    def _remember(self, caller: Address) -> None:
        self._callers.pop(caller, None)
        if len(self._callers) >= REMEMBERED:
            del self._callers[next(iter(self._callers))]
        self._callers[caller] = None

    def _note(self, clients: set[Address]) -> None:
        """Wait for the first calls of clients. All share one timer and one look, on another thread, because a look
        costs some 26 us for each connection of the process."""
        assert self._loop is not None
        # A stream is one call, however long it lasts.
        for address in clients & self._callers.keys():
            self._remember(address)
        new = set(islice(clients - self._waiting - self._callers.keys(), REMEMBERED - len(self._waiting)))
        if new:
            self._waiting |= new
            self._loop.call_later(WAIT_S, self._look_again, new)

    def _look_again(self, addresses: set[Address]) -> None:
        assert self._loop is not None
        looking = self._loop.run_in_executor(None, clients_of, self._port)
        looking.add_done_callback(partial(self._looked, addresses))

    def _looked(self, addresses: set[Address], looking: asyncio.Future[set[Address]]) -> None:
        silent = addresses & self._waiting
        self._waiting -= silent
        with suppress(OSError):
            for host, _ in silent - looking.result():
                self._tell(host)

    def _tell(self, host: str) -> None:
        now, (at, more) = self._clock(), self._logged.get(host, (-QUIET_S, 0))
        if now - at < QUIET_S:
            self._logged[host] = at, more + 1
            return
        if host not in self._logged and len(self._logged) >= REMEMBERED:
            del self._logged[next(iter(self._logged))]
        self._logged[host] = now, 0
        logger.warning(TEXT, host, f", {more} times more since the last line about it" if more else "")


def clients_of(port: int) -> set[Address]:
    """Return the addresses of the clients that are connected to this port of the process. Raises OSError."""
    clients = set[Address]()
    for name in os.listdir(FILES):
        # Other threads may close a file at any time.
        with suppress(OSError):
            if os.readlink(f"{FILES}/{name}").startswith("socket:"):
                clients |= _client_of(int(name), port)
    return clients


def _client_of(file: int, port: int) -> set[Address]:
    """Return the client at the other end of a socket of this port; empty for other sockets. Raises OSError."""
    copy = os.dup(file)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getsockname()[1] != port:
            return set()
        host, client_port, *_ = connection.getpeername()
        return {(_plain(host), client_port)}


def address_of(peer: str) -> Address | None:
    """Return the address of a peer as gRPC names it, `ipv4:10.0.0.7:41234` or `ipv6:%5B::1%5D:41234`."""
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    return (_plain(host.strip("[]")), int(port)) if kind in ("ipv4", "ipv6") and port.isdecimal() else None


def _plain(host: str) -> str:
    """Return an IP address in one spelling; IPv4 addresses may stand in IPv6 ones."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)
