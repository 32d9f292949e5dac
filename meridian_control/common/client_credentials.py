"""Credentials with which a client of the control plane shows who it is: paths of TLS files and of a token file.

The client is `meridianctl`, or a replica that calls another replica; the module does not know which. The token is read
again for every call, so that its file can be replaced while the client runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import grpc

from meridian_control.common.environment import read
from meridian_control.common.pem_files import authorities, key_pair

# Environment variable of each path.
VARIABLES = {
    "ca": "MERIDIAN_TLS_CA",
    "cert": "MERIDIAN_TLS_CERT",
    "key": "MERIDIAN_TLS_KEY",
    "token_file": "MERIDIAN_TOKEN_FILE",
}


@dataclass(frozen=True)
class ClientCredentials:
    """Paths of a client's files; an empty path means no file. Connections use TLS if `ca` or `cert` is given. A token
    is never sent without TLS."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    token_file: str = ""

    @classmethod
    def from_environment(cls) -> Self:
        """Return the credentials that the agent's environment variables name (`MERIDIAN_TLS_CA` and so on)."""
        return cls(**{field: read(variable) for field, variable in VARIABLES.items()})

    def filled_from(self, other: ClientCredentials) -> ClientCredentials:
        """Return these credentials, with each unset path taken from `other`."""
        return ClientCredentials(*(getattr(self, field.name) or getattr(other, field.name) for field in fields(self)))

    def files(self) -> list[Path]:
        """Return the files that a connection needs, without the token file, which each call reads anew."""
        return [Path(path) for path in (self.ca, self.cert, self.key) if path]

    def channel(self) -> grpc.ChannelCredentials | None:
        """Return the credentials for a channel, None without TLS. Raises OSError or ValueError for an unusable file."""
        if not self.ca and not self.cert:
            if self.token_file:
                raise ValueError("a token is only sent over TLS: name the CA of the server's certificate too")
            return None
        if bool(self.cert) != bool(self.key):
            raise ValueError("a certificate and its key belong together: name both")
        key, cert = key_pair(Path(self.cert), Path(self.key)) if self.cert else (None, None)
        credentials = grpc.ssl_channel_credentials(authorities(Path(self.ca)) if self.ca else None, key, cert)
        if self.token_file:
            _token(self.token_file)
            shown = grpc.metadata_call_credentials(_Shown(self.token_file))
            credentials = grpc.composite_channel_credentials(credentials, shown)
        return credentials


class _Shown(grpc.AuthMetadataPlugin):
    """Adds the token to a call. gRPC invokes the plugin for each call, on a thread of gRPC's own."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback) -> None:
        try:
            callback((("authorization", f"Bearer {_token(self._path)}"),), None)
        except (OSError, ValueError) as error:
            callback((), error)


def _token(path: str) -> str:
    token = Path(path).read_bytes().strip()
    if not re.fullmatch(rb"[ -~]+", token):
        raise ValueError(f"{path}: holds no token of printable ASCII characters")
    return token.decode()
