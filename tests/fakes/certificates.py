"""A certificate authority for tests: servers on 127.0.0.1, and clients."""

from __future__ import annotations

import ipaddress
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

HOSTS = ("127.0.0.1", "localhost", "registry.test")


class Authority:
    """Writes its files into ``folder``; ``path`` is its own certificate."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("test authority")
        self._certificate = self._sign(self._name, self._key, None)
        self.path = folder / "authority.pem"
        self.path.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        alternative: x509.SubjectAlternativeName | None,
        days: int = 30,
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=100))
            .not_valid_after(now + timedelta(days=days))
            .add_extension(x509.BasicConstraints(alternative is None, None), critical=True)
        )
        if alternative is not None:
            builder = builder.add_extension(alternative, critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def issue(
        self, name: str, hosts: tuple[str, ...] = HOSTS, *, days: int = 30
    ) -> tuple[Path, Path]:
        """A certificate for ``hosts`` and for so many days more, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [_alternative(host) for host in hosts]
        certificate = self._sign(_name(name), key, x509.SubjectAlternativeName(names), days)
        paths = self._folder / f"{name}.cert.pem", self._folder / f"{name}.key.pem"
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return paths

    def client(self, name: str) -> tuple[Path, Path]:
        """A client's certificate and key."""
        return self.issue(name)

    def server_context(self, *, want_client: bool = False) -> ssl.SSLContext:
        """What a server needs; with ``want_client`` it lets only this authority's clients in."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.issue("server"))
        if want_client:
            context.load_verify_locations(self.path)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _alternative(host: str) -> x509.GeneralName:
    if host[0].isdecimal():
        return x509.IPAddress(ipaddress.ip_address(host))
    return x509.DNSName(host)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
