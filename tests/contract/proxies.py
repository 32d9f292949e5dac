"""A listener that stands where `http_proxy` points, and notes what clients ask of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# Variables with which users send other programs through a proxy; gRPC's core reads all but the upper-case one.
VARIABLES = ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy")


class Proxy:
    """An HTTP proxy that notes the first line of each connection and tunnels the connection to its target."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.asked: list[str] = []
        # Whether nothing passes any more, as through a network that is lost.
        self.silent = False
        self._open: list[socket.socket] = [self._socket]
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that name this proxy for every program."""
        return dict.fromkeys(VARIABLES, self.url) | {"no_proxy": "", "no_grpc_proxy": ""}

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            self._open.append(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        said = b""
        while b"\r\n\r\n" not in said:
            if not (part := client.recv(4096)):
                return
            said += part
        line = said.split(b"\r\n")[0].decode()
        self.asked.append(line)
        host, _, port = line.split()[1].rpartition(":")
        server = socket.create_connection((host, int(port)))
        self._open.append(server)
        client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        threading.Thread(target=self._copy, args=(server, client), daemon=True).start()
        self._copy(client, server)

    def _copy(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while part := one.recv(65536):
                if not self.silent:
                    other.sendall(part)

    def close(self) -> None:
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@contextmanager
def proxy() -> Iterator[Proxy]:
    found = Proxy()
    try:
        yield found
    finally:
        found.close()
