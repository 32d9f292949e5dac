"""Finds out why TLS with a server fails, after gRPC has failed: gRPC says "Socket closed" for most causes.

The look makes one connection of its own, with Python's ssl, and speaks TLS and the first bytes of HTTP/2. It runs only
after a failure, blocks for at most a few seconds per address of the name, and never raises. The agent has a copy with
the names of its variables.
"""

from __future__ import annotations

import socket
import ssl
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from cryptography import x509

if TYPE_CHECKING:
    from meridian_control.common.client_credentials import ClientCredentials

CONNECT_S, ANSWER_S = 2.0, 2.0
# Status codes with which gRPC reports a TLS handshake that fails, or one that a call waits for in vain.
MAY_BE_TLS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED)
# Names of what sets the CA, and the certificate and its key, for the text.
CA, CERT = "--ca (MERIDIAN_TLS_CA)", "--cert and --key (MERIDIAN_TLS_CERT, MERIDIAN_TLS_KEY)"


@dataclass(frozen=True)
class Names:
    """How the user of these credentials sets the CA, and the certificate with its key."""

    ca: str = CA
    cert: str = CERT


def trouble(target: str, credentials: ClientCredentials, names: Names = Names()) -> str:
    """Return why TLS with the server at `target` fails, and what to set; empty if the look finds nothing."""
    if (place := host_and_port(target)) is None:
        return ""
    try:
        with socket.create_connection(place, CONNECT_S) as connection:
            if credentials.ca or credentials.cert:
                return _secured(connection, place[0], credentials, names)
            return _plain(connection, place[0], names)
    except (OSError, ValueError):
        # Nobody listens, or the files have been replaced by others since gRPC used them.
        return ""


def host_and_port(target: str) -> tuple[str, int] | None:
    """Return host and port of a gRPC target, None for one that names no TCP address."""
    scheme, separator, rest = target.partition("://")
    name = rest.lstrip("/").rpartition("/")[2] if separator else target
    if (separator and scheme not in ("dns", "ipv4", "ipv6")) or target.startswith(("unix:", "unix-abstract:")):
        return None
    for prefix in ("dns:", "ipv4:", "ipv6:"):
        name = name.removeprefix(prefix)
    host, _, port = name.rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() else None


def _plain(connection: socket.socket, host: str, names: Names) -> str:
    """Look whether the server that was called without TLS speaks TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with _handshake(connection, host, context):
            pass
    except ssl.SSLError as error:
        # The server does not speak TLS either, unless its own alert refuses this client's.
        if "ALERT" not in (error.reason or ""):
            return ""
    return f"the server wants TLS, and this client uses none: set {names.ca}"


def _secured(connection: socket.socket, host: str, credentials: ClientCredentials, names: Names) -> str:
    if when := _out_of_date(credentials.cert):
        return f"the client certificate {credentials.cert} {when}: renew {names.cert}, or set this machine's clock"
    context = ssl.create_default_context(cafile=credentials.ca or None)
    # As gRPC does: an intermediate certificate may stand for the CA, and no certificate needs a key identifier.
    context.verify_flags = ssl.VERIFY_X509_TRUSTED_FIRST | ssl.VERIFY_X509_PARTIAL_CHAIN
    if credentials.cert:
        context.load_cert_chain(credentials.cert, credentials.key)
    try:
        with _handshake(connection, host, context) as secured:
            return "" if _begins(secured) else _refused(credentials, names)
    except ssl.SSLCertVerificationError as error:
        return _unverified(error, host, credentials, names, context)
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"):
            return f"the server uses no TLS, and this client does: unset {names.ca}, or give the server --tls-cert"
        return _refused(credentials, names)
    except (ConnectionError, EOFError):
        return _refused(credentials, names)


def _begins(connection: ssl.SSLSocket) -> bool:
    """Return whether the server goes on after the handshake; a server that is silent may still do so.

    A server that has let the client in begins with its HTTP/2 settings. With TLS 1.3 it looks at the client's
    certificate only after the handshake has ended for the client.
    """
    connection.settimeout(ANSWER_S)
    try:
        return bool(connection.recv(1))
    except TimeoutError:
        return True


def _refused(credentials: ClientCredentials, names: Names) -> str:
    if not credentials.cert:
        return f"the server has ended the TLS handshake; it wants a client certificate (--client-ca): set {names.cert}"
    return (
        f"the server has ended the TLS handshake; it does not accept the client certificate {credentials.cert}: it "
        "must be signed by the CA of the server's --client-ca, and the server's clock must be right"
    )


def _unverified(
    error: ssl.SSLCertVerificationError,
    host: str,
    credentials: ClientCredentials,
    names: Names,
    context: ssl.SSLContext,
) -> str:
    why = error.verify_message
    if "expired" in why or "not yet valid" in why:
        when = "has expired" if "expired" in why else "is not valid yet"
        if credentials.ca and any(map(_is_out_of_date, context.get_ca_certs())):
            return f"the server's certificate or one in {credentials.ca} {when}: renew its --tls-cert, or {names.ca}"
        return f"the server's certificate {when}: renew its --tls-cert, or set this machine's clock ({why})"
    if "mismatch" in why or "not valid for" in why:
        return f"the server's certificate is not for {host}: use an address that it names, or renew its --tls-cert"
    ca = credentials.ca or "the system's CAs"
    return f"the server's certificate is not signed by {ca} ({why}): {names.ca} must name the CA of its --tls-cert"


def _is_out_of_date(ca: dict[str, Any]) -> bool:
    begins, ends = (ssl.cert_time_to_seconds(ca[when]) for when in ("notBefore", "notAfter"))
    return not begins <= time.time() <= ends


def _handshake(connection: socket.socket, host: str, context: ssl.SSLContext) -> ssl.SSLSocket:
    context.set_alpn_protocols(["h2"])
    return context.wrap_socket(connection, server_hostname=host)


def _out_of_date(cert: str) -> str:
    """Return since when a certificate has expired, or when it becomes valid; empty if it is valid, or if there is
    none."""
    if not cert:
        return ""
    read, now = x509.load_pem_x509_certificate(Path(cert).read_bytes()), datetime.now(UTC)
    if read.not_valid_before_utc > now:
        return f"is not valid before {read.not_valid_before_utc:%Y-%m-%d %H:%M UTC}"
    return f"has expired on {read.not_valid_after_utc:%Y-%m-%d %H:%M UTC}" if read.not_valid_after_utc < now else ""
