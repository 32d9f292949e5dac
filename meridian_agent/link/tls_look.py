"""Finds out why TLS with a control plane fails, after gRPC has failed: gRPC says "Socket closed" for most causes.

The look makes one connection of its own, with Python's ssl, and speaks TLS and the first bytes of HTTP/2. It runs on
the link's thread, only after a failure, for at most a few seconds per address of the name, and never raises.
`meridian_control.common.tls_look` does the same for the control plane's clients.
"""

from __future__ import annotations

import socket
import ssl
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meridian_agent.link.credentials import AgentCredentials

CONNECT_S, ANSWER_S = 2.0, 2.0
CERT = "MERIDIAN_TLS_CERT and MERIDIAN_TLS_KEY"


def trouble(target: str, credentials: AgentCredentials) -> str:
    """Return why TLS with the server at `target` fails, and what to set; empty if the look finds nothing."""
    if (place := host_and_port(target)) is None:
        return ""
    try:
        with socket.create_connection(place, CONNECT_S) as connection:
            if credentials.ca or credentials.cert:
                return _secured(connection, place[0], credentials)
            return _plain(connection, place[0])
    except Exception:
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


def _plain(connection: socket.socket, host: str) -> str:
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
    return "the control plane wants TLS, and this agent uses none: set MERIDIAN_TLS_CA"


def _secured(connection: socket.socket, host: str, credentials: AgentCredentials) -> str:
    if when := _out_of_date(credentials.cert):
        return f"the certificate {credentials.cert} {when}: renew {CERT}, or set this machine's clock"
    context = ssl.create_default_context(cafile=credentials.ca or None)
    # As gRPC does: an intermediate certificate may stand for the CA, and no certificate needs a key identifier.
    context.verify_flags = ssl.VERIFY_X509_TRUSTED_FIRST | ssl.VERIFY_X509_PARTIAL_CHAIN
    if credentials.cert:
        context.load_cert_chain(credentials.cert, credentials.key)
    try:
        with _handshake(connection, host, context) as secured:
            return "" if _begins(secured) else _refused(credentials)
    except ssl.SSLCertVerificationError as error:
        return _unverified(error, host, credentials, context)
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"):
            return "the control plane uses no TLS, and this agent does: unset MERIDIAN_TLS_CA, or give it --tls-cert"
        return _refused(credentials)
    except (ConnectionError, EOFError):
        return _refused(credentials)


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


def _refused(credentials: AgentCredentials) -> str:
    if not credentials.cert:
        return f"the control plane has ended the TLS handshake; it wants a certificate (--client-ca): set {CERT}"
    return (
        f"the control plane has ended the TLS handshake; it does not accept the certificate {credentials.cert}: it "
        "must be signed by the CA of the control plane's --client-ca, and the control plane's clock must be right"
    )


def _unverified(
    error: ssl.SSLCertVerificationError, host: str, credentials: AgentCredentials, context: ssl.SSLContext
) -> str:
    why = error.verify_message
    if "expired" in why or "not yet valid" in why:
        when = "has expired" if "expired" in why else "is not valid yet"
        if credentials.ca and any(_when(ca) for ca in context.get_ca_certs()):
            mine = f"or one in {credentials.ca} {when}: renew its --tls-cert, or MERIDIAN_TLS_CA"
            return f"the control plane's certificate {mine}"
        return f"the control plane's certificate {when}: renew its --tls-cert, or set this machine's clock ({why})"
    if "mismatch" in why or "not valid for" in why:
        return f"the control plane's certificate is not for {host}: name it in MERIDIAN_CONTROL as its --tls-cert does"
    ca = credentials.ca or "the system's CAs"
    return (
        f"the control plane's certificate is not signed by {ca} ({why}): MERIDIAN_TLS_CA must name the CA of its "
        "--tls-cert"
    )


def _handshake(connection: socket.socket, host: str, context: ssl.SSLContext) -> ssl.SSLSocket:
    context.set_alpn_protocols(["h2"])
    return context.wrap_socket(connection, server_hostname=host)


def _out_of_date(cert: str) -> str:
    """Return since when a certificate has expired, or when it becomes valid; empty if it is valid, if there is none, or
    if this Python cannot read it."""
    decode: Any = getattr(getattr(ssl, "_ssl", None), "_test_decode_cert", None)
    return _when(decode(cert)) if cert and decode is not None else ""


def _when(cert: dict[str, Any]) -> str:
    """Return what `_out_of_date` does, for a certificate that Python has read."""
    begins, ends = str(cert["notBefore"]), str(cert["notAfter"])
    if ssl.cert_time_to_seconds(begins) > time.time():
        return f"is not valid before {begins}"
    return f"has expired on {ends}" if ssl.cert_time_to_seconds(ends) < time.time() else ""
