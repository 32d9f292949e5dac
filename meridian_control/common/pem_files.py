"""Reads certificates and keys, and refuses those that TLS cannot use: gRPC would say only that a handshake fails, and
takes an empty file of CAs for none, so that it trusts every public CA."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

if TYPE_CHECKING:
    from pathlib import Path


def key_pair(cert: Path, key: Path) -> tuple[bytes, bytes]:
    """Return the private key and the certificate chain in two files. Raises OSError or ValueError if they cannot be
    used."""
    chain, secret = cert.read_bytes(), key.read_bytes()
    leaf = _certificates(cert, chain)[0]
    try:
        private = load_pem_private_key(secret, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(f"{key}: is no PEM private key without a password") from error
    # The check can fail for a moment while certificate and key are replaced one after the other.
    if private.public_key() != leaf.public_key():
        raise ValueError(f"{key}: is not the key of {cert}")
    return secret, chain


def authorities(ca: Path) -> bytes:
    """Return the certificates of the CAs in a file. Raises OSError or ValueError if it holds none."""
    pem = ca.read_bytes()
    try:
        # `cryptography` warns of a system's bundle because of the serial number of one CA, and will refuse it all.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(f"{ca}: holds no PEM certificate") from error
    return pem


def _certificates(path: Path, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ValueError(f"{path}: holds no PEM certificate") from error
