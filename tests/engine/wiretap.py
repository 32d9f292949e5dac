"""A relay between an engine and its control plane that keeps every byte the engine sends.

The module owns the sockets, and reads HTTP/2 frames and gRPC messages from the kept bytes. The relay changes no byte.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator

from meridian.v1 import agent_pb2

# The first byte of a TLS handshake, and the first one of its version.
TLS_HANDSHAKE = b"\x16\x03"
PREFACE, FRAME_BYTES, DATA = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 9, 0
# Header of each gRPC message: whether it is compressed, and its length.
PREFIX_BYTES = 5


class Wiretap:
    """Listens on `target` and passes all data on to the given address. `sent` has the bytes of each connection."""

    def __init__(self, target: str) -> None:
        self._address = _address(target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.sent: list[bytearray] = []
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                engine, _ = self._listener.accept()
                control = socket.create_connection(self._address)
                self._sockets += [engine, control]
                kept = bytearray()
                self.sent.append(kept)
                for source, to, keep in ((engine, control, kept), (control, engine, None)):
                    threading.Thread(target=_pass_on, args=(source, to, keep), daemon=True).start()

    def stop(self) -> None:
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def messages(self) -> list[agent_pb2.ConnectRequest]:
        """Return the engine's messages, read from the bytes. Raises DecodeError for a malformed message."""
        return [agent_pb2.ConnectRequest.FromString(body) for kept in self.sent for body in _bodies(bytes(kept))]


def _address(target: str) -> tuple[str, int]:
    host, _, port = target.rpartition(":")
    return host, int(port)


def _pass_on(source: socket.socket, to: socket.socket, kept: bytearray | None) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            if kept is not None:
                kept += data
            to.sendall(data)
        to.shutdown(socket.SHUT_WR)


def _bodies(kept: bytes) -> Iterator[bytes]:
    """Yield the gRPC messages of a connection, stream by stream; the last one, or the preface, may be cut off.

    After a failed stream the agent also looks whether the server speaks TLS; such a connection has no message.
    """
    if kept.startswith(TLS_HANDSHAKE):
        return
    assert PREFACE.startswith(kept[: len(PREFACE)])
    at, streams = len(PREFACE), defaultdict[int, bytearray](bytearray)
    while at + FRAME_BYTES <= len(kept):
        length, kind = int.from_bytes(kept[at : at + 3], "big"), kept[at + 3]
        stream = int.from_bytes(kept[at + 5 : at + FRAME_BYTES], "big")
        at += FRAME_BYTES + length
        if kind == DATA:
            streams[stream] += kept[at - length : at]
    for data in streams.values():
        at = 0
        while at + PREFIX_BYTES <= len(data):
            assert data[at] == 0, "a compressed message"
            length = int.from_bytes(data[at + 1 : at + PREFIX_BYTES], "big")
            at += PREFIX_BYTES + length
            if at <= len(data):
                yield bytes(data[at - length : at])
