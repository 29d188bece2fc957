"""Keys on disk: ed25519, private ones as PEM PKCS#8, public ones as PEM SubjectPublicKeyInfo.

The id of a key is the sha256 of its public form (DER), in hex. Trusted keys are the ``*.pub``
files of a directory, read again at each use: a rotation is a file more, then a file less. A key
that others can change is no key; one that others can read is no secret.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from snapshotter.errors import AlreadyExistsError, ConfigError

PUBLIC_SUFFIX = ".pub"
KEY_LIMIT = 256
_FILE_LIMIT_BYTES = 64 * 1024
_WRITABLE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key, and the id that its signatures carry."""

    key_id: str
    key: Ed25519PrivateKey = field(repr=False)

    def sign(self, message: bytes) -> bytes:
        """The signature of ``message``, 64 bytes."""
        return self.key.sign(message)


@dataclass(frozen=True, slots=True)
class Keyring:
    """Public keys by their id, where each is from, and what was wrong with other files."""

    keys: dict[str, Ed25519PublicKey]
    names: dict[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def key_id(key: Ed25519PublicKey) -> str:
    """The name of a key: sha256 of its SubjectPublicKeyInfo in DER, in hex."""
    return hashlib.sha256(_public_der(key)).hexdigest()


def load_signing_key(path: Path) -> SigningKey:
    """The private key in ``path``. ConfigError says why it is none that may be used."""
    data = _read(path, secret=True)
    try:
        key = load_pem_private_key(data, password=None)
    except TypeError:
        raise ConfigError(
            f"signing key {path} is encrypted, and nobody is here to type its password: decrypt it "
            "into a file of its own for the build (openssl pkey -in KEY -out PLAIN)"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(
            f"signing key {path} is no private key in PEM; `ember index keygen` makes one"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"signing key {path} is not ed25519; `ember index keygen` makes one")
    return SigningKey(key_id(key.public_key()), key)


def load_public_key(path: Path) -> Ed25519PublicKey:
    """The public key in ``path``. ConfigError says why it is none that may be trusted."""
    data = _read(path, secret=False)
    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"trusted key {path} is no public key in PEM") from None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"trusted key {path} is not ed25519")
    return key


def load_keyring(paths: list[Path]) -> Keyring:
    """The public keys in ``paths``; a file that is none is a problem, not an error."""
    keys, names, problems = {}, {}, []
    for path in paths:
        try:
            key = load_public_key(path)
        except ConfigError as error:
            problems.append(str(error))
            continue
        keys[key_id(key)] = key
        names[key_id(key)] = path.name
    return Keyring(keys, names, tuple(problems))


@dataclass(frozen=True, slots=True)
class TrustedKeys:
    """The directory of the keys that are trusted."""

    directory: Path

    def read(self) -> Keyring:
        """The keys that lie there now; none if there is no such directory."""
        try:
            facts = self.directory.stat()
            found = sorted(p for p in self.directory.iterdir() if p.suffix == PUBLIC_SUFFIX)
        except FileNotFoundError:
            return Keyring({})
        except OSError as error:
            return Keyring({}, problems=(f"trusted keys {self.directory}: {error.strerror}",))
        told = ""
        if facts.st_uid not in (0, os.geteuid()):
            told = f"it belongs to user {facts.st_uid}, neither root nor you"
        elif facts.st_mode & _WRITABLE:
            told = "others may write there (chmod go-w it)"
        if told:
            return Keyring({}, problems=(f"trusted keys {self.directory}: {told}",))
        ring = load_keyring(found[:KEY_LIMIT])
        if len(found) > KEY_LIMIT:
            told = f"trusted keys {self.directory}: only the first {KEY_LIMIT} are read"
            return Keyring(ring.keys, ring.names, (*ring.problems, told))
        return ring


def write_key_pair(path: Path) -> SigningKey:
    """Make a key: private in ``path`` (0600), public beside it with ``.pub``.

    AlreadyExistsError if there is either file; nothing is ever overwritten.
    """
    public_path = path.with_name(path.name + PUBLIC_SUFFIX)
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    _create(path, private, 0o600)
    try:
        _create(public_path, public, 0o644)
    except BaseException:
        path.unlink()
        raise
    return SigningKey(key_id(key.public_key()), key)


def _create(path: Path, data: bytes, mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(path, flags, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise AlreadyExistsError(f"{path} is there already; a key is never overwritten") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _read(path: Path, *, secret: bool) -> bytes:
    what = f"{'signing' if secret else 'trusted'} key {path}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        told = "there is no such file" if error.errno == errno.ENOENT else error.strerror
        raise ConfigError(f"{what}: {told}") from None
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise ConfigError(f"{what} is no file")
        if facts.st_uid not in (0, os.geteuid()):
            raise ConfigError(f"{what} belongs to user {facts.st_uid}, neither root nor you")
        if secret and facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            if b"PUBLIC KEY" in file.read(_FILE_LIMIT_BYTES):
                raise ConfigError(f"{what} is a public key; sign with the file beside it")
            raise ConfigError(f"{what} can be read by others: chmod 600 it")
        if facts.st_mode & _WRITABLE:
            raise ConfigError(f"{what} can be changed by others: chmod go-w it")
        data = file.read(_FILE_LIMIT_BYTES + 1)
    if len(data) > _FILE_LIMIT_BYTES:
        raise ConfigError(f"{what} is longer than any key")
    return data


def _public_der(key: Ed25519PublicKey) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
