"""Provides the TLS credentials of the server, whose certificate, key and client CA are renewed by replacing the files.

The module owns the checks of a key pair. The next connection uses new files; open connections stay. gRPC asks for the
credentials before each handshake, on threads of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from meridian_control.common.reloading_file import Reloaded

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Configuration = grpc.ServerCertificateConfiguration


def server_credentials(
    cert: Path, key: Path, client_ca: Path | None = None, begun: Callable[[], object] = lambda: None
) -> grpc.ServerCredentials:
    """Return TLS credentials with the certificate chain in `cert` and the private key in `key`.

    begun: called on gRPC's threads before each handshake. With `client_ca`, every client must show a certificate that
    this CA has signed. Raises OSError or ValueError if a file cannot be used.
    """
    paths = [cert, key, *([client_ca] if client_ca else [])]
    files = Reloaded(paths, lambda: _configuration(cert, key, client_ca))
    given = files.get()

    def renewed() -> Configuration | None:
        nonlocal given
        begun()
        before, given = given, files.get()
        return None if given is before else given

    # The type stubs of grpc do not allow None, which the function returns for no change.
    fetch: Any = renewed
    return grpc.dynamic_ssl_server_credentials(given, fetch, require_client_authentication=client_ca is not None)


def _configuration(cert: Path, key: Path, client_ca: Path | None) -> Configuration:
    chain, secret = cert.read_bytes(), key.read_bytes()
    leaf = _certificates(cert, chain)[0]
    try:
        private = load_pem_private_key(secret, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(f"{key}: is no PEM private key without a password") from error
    # The check can fail for a moment while certificate and key are replaced one after the other.
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
