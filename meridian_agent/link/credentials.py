"""Reads the certificates, the key and the token with which agent and control plane identify themselves, from files that
the environment names, and opens the agent's channels.

The files are read again for every stream, so that they can be replaced while the engine runs. Runs on the link's
thread.
"""

from __future__ import annotations

import importlib
import logging
import re
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import grpc

from meridian_agent.link.environment import complain, read
from meridian_agent.link.identity import is_address

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

# gRPC imports this module when it makes its first channel. That would be on the link's thread, while the engine works
# and may be going through the loaded modules or their loggers.
with suppress(ImportError):
    importlib.import_module("grpc._channel")

logger = logging.getLogger("vllm.meridian")


@dataclass(frozen=True)
class AgentCredentials:
    """Paths of the files, empty for none. The stream uses TLS if `ca` or `cert` is set; the token is never sent without
    TLS.

    proxy: URL of the HTTP proxy between the agent and the control plane, empty for none.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    token_file: str = ""
    proxy: str = ""

    @classmethod
    def from_environment(cls) -> Self:
        ca, cert, key = map(read, ("MERIDIAN_TLS_CA", "MERIDIAN_TLS_CERT", "MERIDIAN_TLS_KEY"))
        return cls(ca, cert, key, read("MERIDIAN_TOKEN_FILE"), _proxy())

    def stamps(self) -> tuple[tuple[int, int], ...]:
        """Return a value that changes when one of the files is replaced or appears."""
        found = []
        for path in filter(None, (self.ca, self.cert, self.key, self.token_file)):
            with suppress(OSError):
                status = Path(path).stat()
                found.append((status.st_ino, status.st_mtime_ns))
        return tuple(found)

    def open(self, target: str, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
        """Open a channel to `target`. Raises OSError or ValueError if a file cannot be used."""
        # Without this, gRPC would use the proxies of http_proxy and https_proxy, which are meant for other programs.
        proxy = ("grpc.http_proxy", self.proxy) if self.proxy else ("grpc.enable_http_proxy", 0)
        options = [*options, proxy]
        if not self.ca and not self.cert:
            return grpc.insecure_channel(target, options)
        if bool(self.cert) != bool(self.key):
            raise ValueError("MERIDIAN_TLS_CERT and MERIDIAN_TLS_KEY belong together")
        files = {"MERIDIAN_TLS_CA": self.ca, "MERIDIAN_TLS_CERT": self.cert, "MERIDIAN_TLS_KEY": self.key}
        ca, cert, key = (_bytes(name, path) if path else None for name, path in files.items())
        if ca is not None:
            _check_ca(self.ca, ca)
        if cert is not None:
            _check_key_pair(self.cert, self.key)
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
        token = _bytes("MERIDIAN_TOKEN_FILE", self.token_file).strip()
        if not re.fullmatch(rb"[ -~]+", token):
            # gRPC would refuse the token with an error that quotes it.
            raise ValueError(f"MERIDIAN_TOKEN_FILE={self.token_file!a}: holds no token of printable ASCII characters")
        return (("authorization", f"Bearer {token.decode()}"),)


def _bytes(name: str, path: str) -> bytes:
    """Return the contents of the file that a variable names. Raises ValueError, which has the variable's name."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{name}={path!a}: {error.strerror}") from error


def _check_ca(path: str, pem: bytes) -> None:
    """Raise ValueError for a file without a certificate: gRPC takes an empty one for none, and would trust all public
    CAs; of any other it says only that the handshake fails."""
    try:
        # Python takes ASCII only; comments between the certificates may have other bytes.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(f"MERIDIAN_TLS_CA={path!a}: holds no PEM certificate") from error


def _check_key_pair(cert: str, key: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # How strong a key must be is the server's decision.
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    try:
        # Without a password, OpenSSL would ask for it on the terminal.
        context.load_cert_chain(cert, key, password="")
    except (ssl.SSLError, ValueError) as error:
        why = f"no PEM certificate with its private key, without a password ({error})"
        raise ValueError(f"MERIDIAN_TLS_CERT={cert!a} and MERIDIAN_TLS_KEY={key!a}: {why}") from error


def _proxy() -> str:
    """Return the URL in MERIDIAN_PROXY, empty if it is unset or cannot be used."""
    said = read("MERIDIAN_PROXY")
    host = said.removeprefix("http://").rstrip("/")
    if said and (host == said or not is_address(host.rpartition("@")[2])):
        complain("MERIDIAN_PROXY", said, "no URL http://host:port; the agent uses no proxy")
        return ""
    if said:
        logger.info("meridian: the stream goes through the proxy %s", host.rpartition("@")[2])
    return said
