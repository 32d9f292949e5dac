"""Reads the certificates, the key and the token with which agent and control plane identify themselves, from files that
the environment names.

The files are read again for every stream, so that they can be replaced while the engine runs. Runs on the link's
thread.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import grpc

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


@dataclass(frozen=True)
class AgentCredentials:
    """Paths of the files, empty for none. The stream uses TLS if `ca` or `cert` is set; the token is never sent without
    TLS."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    token_file: str = ""

    @classmethod
    def from_environment(cls) -> Self:
        names = ("MERIDIAN_TLS_CA", "MERIDIAN_TLS_CERT", "MERIDIAN_TLS_KEY", "MERIDIAN_TOKEN_FILE")
        return cls(*(os.environ.get(name, "") for name in names))

    def open(self, target: str, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
        """Open a channel to `target`. Raises OSError or ValueError if a file cannot be used."""
        if not self.ca and not self.cert:
            return grpc.insecure_channel(target, options)
        if bool(self.cert) != bool(self.key):
            raise ValueError("MERIDIAN_TLS_CERT and MERIDIAN_TLS_KEY belong together")
        ca, cert, key = (Path(path).read_bytes() if path else None for path in (self.ca, self.cert, self.key))
        return grpc.secure_channel(target, grpc.ssl_channel_credentials(ca, key, cert), options)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata that carries the token, for one call. Raises OSError or ValueError if the token cannot be
        sent.

        gRPC's own call credentials are not used: gRPC's core would ask Python for the credentials on one of its
        threads, and a fork, which holds the lock that this thread needs, would wait for the thread up to a minute.
        """
        if not self.token_file:
            return ()
        if not self.ca and not self.cert:
            raise ValueError("MERIDIAN_TOKEN_FILE needs TLS: set MERIDIAN_TLS_CA")
        token = Path(self.token_file).read_text(encoding="ascii").strip()
        if not token.isprintable():
            # gRPC would refuse the token with an error that quotes it.
            raise ValueError("the token in MERIDIAN_TOKEN_FILE has control characters")
        return (("authorization", f"Bearer {token}"),)
