"""Provides the TLS credentials of the server, whose certificate, key and client CA are renewed by replacing the files.

The next connection uses new files; open connections stay. gRPC asks for the credentials before each handshake, on
threads of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from meridian_control.common.pem_files import authorities, key_pair
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
    roots = authorities(client_ca) if client_ca is not None else None
    return grpc.ssl_server_certificate_configuration([key_pair(cert, key)], root_certificates=roots)
