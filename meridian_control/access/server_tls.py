"""TLS of the listener: certificate, key and the CA of clients, renewed by replacing the files.

Owns what is accepted as a key pair. New files count from the next connection on; connections that are open stay. gRPC
asks on threads of its own, before each handshake.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from meridian_control.access.reloading_file import Reloaded

if TYPE_CHECKING:
    from pathlib import Path

    Configuration = grpc.ServerCertificateConfiguration


def server_credentials(cert: Path, key: Path, client_ca: Path | None = None) -> grpc.ServerCredentials:
    """TLS with the chain in `cert`; with `client_ca` every client must show a certificate that it signed.

    Raises OSError or ValueError.
    """
    paths = [cert, key, *([client_ca] if client_ca else [])]
    files = Reloaded(paths, lambda: _configuration(cert, key, client_ca))
    given = files.get()

    def renewed() -> Configuration | None:
        nonlocal given
        before, given = given, files.get()
        return None if given is before else given

    # None, for no change, is missing from the stubs.
    fetch: Any = renewed
    return grpc.dynamic_ssl_server_credentials(given, fetch, require_client_authentication=client_ca is not None)


def _configuration(cert: Path, key: Path, client_ca: Path | None) -> Configuration:
    chain, secret = cert.read_bytes(), key.read_bytes()
    leaf = _certificates(cert, chain)[0]
    try:
        private = load_pem_private_key(secret, password=None)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{key}: is no PEM key without a password") from error
    # Written one after the other, the two do not fit for a moment.
    if private.public_key() != leaf.public_key():
        raise ValueError(f"{key}: is not the key of {cert}")
    roots = None
    if client_ca is not None:
        roots = client_ca.read_bytes()
        _certificates(client_ca, roots)
    return grpc.ssl_server_certificate_configuration([(secret, chain)], root_certificates=roots)


def _certificates(path: Path, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ValueError(f"{path}: holds no PEM certificate") from error
