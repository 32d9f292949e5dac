"""How a client of the control plane shows who it is: TLS files and a token file, by path.

Knows nothing of who the client is: `meridianctl`, or a replica that asks another. The token is read again for every
call, so that it can be replaced meanwhile.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import grpc


@dataclass(frozen=True)
class ClientCredentials:
    """Paths, empty for none. With `ca` or `cert` connections use TLS; a token is never sent without it."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    token_file: str = ""

    @classmethod
    def from_environment(cls) -> Self:
        """Named as the agent's are."""
        names = ("MERIDIAN_TLS_CA", "MERIDIAN_TLS_CERT", "MERIDIAN_TLS_KEY", "MERIDIAN_TOKEN_FILE")
        return cls(*(os.environ.get(name, "") for name in names))

    def over(self, other: ClientCredentials) -> ClientCredentials:
        """These credentials, with those of `other` where they are not set."""
        return ClientCredentials(*(getattr(self, field.name) or getattr(other, field.name) for field in fields(self)))

    def files(self) -> list[Path]:
        """The credentials of a connection; the token is read for each call."""
        return [Path(path) for path in (self.ca, self.cert, self.key) if path]

    def channel(self) -> grpc.ChannelCredentials | None:
        """For channels, None without TLS. Raises OSError or ValueError where the files cannot be used."""
        if not self.ca and not self.cert:
            if self.token_file:
                raise ValueError("a token is only sent over TLS: name the CA of the server's certificate too")
            return None
        if bool(self.cert) != bool(self.key):
            raise ValueError("a certificate and its key belong together: name both")
        ca, cert, key = (Path(path).read_bytes() if path else None for path in (self.ca, self.cert, self.key))
        credentials = grpc.ssl_channel_credentials(ca, key, cert)
        if self.token_file:
            _token(self.token_file)
            shown = grpc.metadata_call_credentials(_Shown(self.token_file))
            credentials = grpc.composite_channel_credentials(credentials, shown)
        return credentials


class _Shown(grpc.AuthMetadataPlugin):
    """Called by gRPC for each call, on a thread of its own."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback) -> None:
        try:
            callback((("authorization", f"Bearer {_token(self._path)}"),), None)
        except (OSError, ValueError) as error:
            callback((), error)


def _token(path: str) -> str:
    return Path(path).read_text(encoding="ascii").strip()
