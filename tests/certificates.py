"""Certificates for tests: a certificate authority that issues them into files."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeAlias

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from meridian_control.common.client_credentials import ClientCredentials

DAY = timedelta(days=1)
PrivateKey: TypeAlias = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, in files, beside the certificate of their authority."""

    ca: Path
    cert: Path
    key: Path

    def credentials(self, token_file: str = "") -> ClientCredentials:
        return ClientCredentials(str(self.ca), str(self.cert), str(self.key), token_file)


class Authority:
    """A CA, whose certificates are in `folder`.

    lasts: as for `issue`. above: the authority that signs this one's certificate, by default this one itself.
    """

    def __init__(
        self, folder: Path, name: str = "ca", lasts: timedelta = DAY, *, above: Authority | None = None
    ) -> None:
        self.folder, self.file = folder, folder / f"{name}.pem"
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        above = above or self
        own = above._builder(self._name, self._key, ca=True, until=datetime.now(UTC) + lasts)
        self.file.write_bytes(_pem(own.sign(above._key, hashes.SHA256())))

    def issue(
        self,
        name: str,
        uri: str = "",
        file: str = "",
        lasts: timedelta = DAY,
        dns: str = "",
        *,
        key: PrivateKey | None = None,
        begins: timedelta = -2 * DAY,
    ) -> Issued:
        """Issue a certificate for servers on this machine and for clients, in files named `file`, by default `name`.

        `lasts` is negative for a certificate that has expired, `begins` positive for one that is not valid yet.
        """
        key = key or ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        if dns:
            names.append(x509.DNSName(dns))
        if uri:
            names.append(x509.UniformResourceIdentifier(uri))
        now = datetime.now(UTC)
        builder = self._builder(_named(name), key, since=now + begins, until=now + lasts)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        issued = Issued(self.file, *(self.folder / f"{file or name}.{kind}" for kind in ("crt", "key")))
        issued.cert.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))
        issued.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return issued

    def _builder(
        self,
        subject: x509.Name,
        key: PrivateKey,
        *,
        until: datetime,
        ca: bool = False,
        since: datetime | None = None,
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(since or until - 3 * DAY)
            .not_valid_after(until)
            .add_extension(x509.BasicConstraints(ca, None), critical=True)
        )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)
