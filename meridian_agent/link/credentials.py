"""How the link knows the control plane, and shows whom it speaks for: files that the environment names.

They are read anew for every stream, so that they can be replaced while the engine runs. Runs on the link's thread.
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
    """Paths, empty for none. With `ca` or `cert` the stream uses TLS; a token is never sent without it."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    token_file: str = ""

    @classmethod
    def from_environment(cls) -> Self:
        names = ("MERIDIAN_TLS_CA", "MERIDIAN_TLS_CERT", "MERIDIAN_TLS_KEY", "MERIDIAN_TOKEN_FILE")
        return cls(*(os.environ.get(name, "") for name in names))

    def open(self, target: str, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
        """A channel to `target`. Raises OSError or ValueError where the files cannot be used."""
        if not self.ca and not self.cert:
            return grpc.insecure_channel(target, options)
        if bool(self.cert) != bool(self.key):
            raise ValueError("MERIDIAN_TLS_CERT and MERIDIAN_TLS_KEY belong together")
        ca, cert, key = (Path(path).read_bytes() if path else None for path in (self.ca, self.cert, self.key))
        return grpc.secure_channel(target, grpc.ssl_channel_credentials(ca, key, cert), options)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata that shows the token, for a call on such a channel. Raises OSError or ValueError where there is
        none to show.

        Not gRPC's call credentials: those it asks Python for on a thread of its core's, for which a fork waits, for up
        to a minute, with the lock that the thread needs.
        """
        if not self.token_file:
            return ()
        if not self.ca and not self.cert:
            raise ValueError("MERIDIAN_TOKEN_FILE needs TLS: set MERIDIAN_TLS_CA")
        token = Path(self.token_file).read_text(encoding="ascii").strip()
        if not token.isprintable():
            # gRPC would refuse it, and say it.
            raise ValueError("MERIDIAN_TOKEN_FILE holds no token: it has control characters")
        return (("authorization", f"Bearer {token}"),)
