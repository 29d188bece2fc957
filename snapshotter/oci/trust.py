"""Whom TLS trusts: the system's authorities, those of hosts.toml beside them, client certificates.

A context is made anew when one of its files has changed, the system's own among them, so that a
renewed certificate or a new authority needs no restart.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from snapshotter.errors import ConfigError
from snapshotter.oci.hosts import TlsFiles

HTTP_1_1, HTTP_2 = "http/1.1", "h2"
_Stamp = tuple[tuple[int, int, int] | None, ...]


class Trust:
    """TLS contexts by what they trust and what they offer to speak."""

    def __init__(self, offers: tuple[str, ...] = (HTTP_1_1,)) -> None:
        self._offers = offers
        self._system = _system_places()
        self._contexts: dict[TlsFiles, tuple[_Stamp, ssl.SSLContext]] = {}

    def context(self, tls: TlsFiles) -> ssl.SSLContext:
        """The context for a host, the same one as long as no file changes. Raises ConfigError."""
        files = [*tls.ca, *(path for pair in tls.client for path in pair if path is not None)]
        stamp = tuple(_stamp(path) for path in (*files, *self._system))
        known = self._contexts.get(tls)
        if known is not None and known[0] == stamp:
            return known[1]
        context = make_tls_context(tls)
        context.set_alpn_protocols(list(self._offers))
        self._contexts[tls] = (stamp, context)
        return context


def make_tls_context(tls: TlsFiles) -> ssl.SSLContext:
    """A client context: the system's trust, the CAs added to it, client certificates loaded.

    ConfigError names the file that is of no use, and why.
    """
    context = ssl.create_default_context()
    if tls.skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    for path in tls.ca:
        try:
            context.load_verify_locations(cafile=str(path))
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"CA {path}: {_fault(error, 'no certificate in PEM')}") from None
    for certificate, key in tls.client:
        names = f"{certificate} with key {key}" if key else f"{certificate}"
        try:
            # An encrypted key fails; without a password given here OpenSSL would ask the terminal.
            context.load_cert_chain(str(certificate), str(key) if key else None, password="")
        except (OSError, ssl.SSLError) as error:
            fault = _fault(error, "not a certificate with its key in PEM, without a password")
            raise ConfigError(f"client certificate {names}: {fault}") from None
    return context


def _fault(error: OSError, otherwise: str) -> str:
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or "").replace("_", " ").lower()
        return f"{otherwise} ({reason})" if reason else otherwise
    return error.strerror or str(error)


def _system_places() -> list[Path]:
    """Where the system's trust lies, or where SSL_CERT_FILE and SSL_CERT_DIR say that it does."""
    paths = ssl.get_default_verify_paths()
    found = [
        os.environ.get(paths.openssl_cafile_env) or paths.openssl_cafile,
        os.environ.get(paths.openssl_capath_env) or paths.openssl_capath,
    ]
    return [Path(path) for path in found]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def words_of_tls(error: ssl.SSLError) -> str:
    """Why a handshake failed, with the way out where there is one."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    reason = (error.reason or "the handshake failed").replace("_", " ").lower()
    if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        return f"it does not speak TLS ({reason}); registry.plain_http allows it to"
    if "certificate required" in reason:
        return f"TLS: {reason}; 'client' in hosts.toml names a certificate for it"
    return f"TLS: {reason}"


def way_to_trust(error: ssl.SSLCertVerificationError) -> str:
    """What an operator can do about a certificate that was not accepted."""
    return next((way for codes, way in _WAYS if error.verify_code in codes), "")


_WAYS = (
    (  # X509_V_ERR: issuer not found, self-signed (alone or at the chain's end), unverifiable
        (2, 18, 19, 20, 21),
        "; 'ca' in its hosts.toml or the system's trust can name who signed it",
    ),
    ((9, 10), "; it has to be renewed there, if this machine's clock is right"),
    ((62, 64), "; it has to be called by a name that its certificate bears"),
)
