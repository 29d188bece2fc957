"""Keys on disk: read anew at each use, refused if others could read or change them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from snapshotter.errors import AlreadyExistsError, ConfigError
from snapshotter.indexes.keys import (
    TrustedKeys,
    key_id,
    load_public_key,
    load_signing_key,
    write_key_pair,
)


def test_a_pair_is_written_and_read_again(tmp_path: Path) -> None:
    made = write_key_pair(tmp_path / "k")
    assert load_signing_key(tmp_path / "k").key_id == made.key_id
    assert key_id(load_public_key(tmp_path / "k.pub")) == made.key_id
    assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["k", "k.pub"])
def test_no_file_is_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(AlreadyExistsError, match="never overwritten"):
        write_key_pair(tmp_path / "k")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_keys_come_and_go_without_a_restart(tmp_path: Path) -> None:
    trusted = TrustedKeys(tmp_path / "keys")
    assert trusted.read().keys == {}
    (tmp_path / "keys").mkdir(mode=0o755)
    old = write_key_pair(tmp_path / "keys" / "old")
    assert set(trusted.read().keys) == {old.key_id}
    new = write_key_pair(tmp_path / "keys" / "new")
    (tmp_path / "keys" / "old.pub").unlink()
    ring = trusted.read()
    assert set(ring.keys) == {new.key_id}
    assert ring.names == {new.key_id: "new.pub"}


def test_a_bad_key_spoils_no_other(tmp_path: Path) -> None:
    good = write_key_pair(tmp_path / "good")
    (tmp_path / "bad.pub").write_text("-----BEGIN PUBLIC KEY-----\nAAAA\n")
    os.mkfifo(tmp_path / "pipe.pub")
    ring = TrustedKeys(tmp_path).read()
    assert set(ring.keys) == {good.key_id}
    assert [str(tmp_path / name) in told for name, told in zip(
        ("bad.pub", "pipe.pub"), ring.problems, strict=True
    )] == [True, True]  # fmt: skip


@pytest.mark.parametrize("mode", [0o666, 0o664])
def test_a_key_that_others_may_change_is_not_trusted(tmp_path: Path, mode: int) -> None:
    write_key_pair(tmp_path / "k")
    (tmp_path / "k.pub").chmod(mode)
    ring = TrustedKeys(tmp_path).read()
    assert not ring.keys
    assert "chmod go-w" in ring.problems[0]


def test_a_directory_that_others_may_write_is_not_trusted(tmp_path: Path) -> None:
    write_key_pair(tmp_path / "k")
    tmp_path.chmod(0o777)
    ring = TrustedKeys(tmp_path).read()
    tmp_path.chmod(0o755)
    assert not ring.keys
    assert "chmod go-w" in ring.problems[0]


@pytest.mark.root
def test_a_directory_of_somebody_else_is_not_trusted(tmp_path: Path) -> None:
    """Its owner could put a link to any file of root's there."""
    write_key_pair(tmp_path / "k")
    os.chown(tmp_path, 65534, -1)
    ring = TrustedKeys(tmp_path).read()
    assert not ring.keys
    assert "belongs to user 65534" in ring.problems[0]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_private_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    write_key_pair(tmp_path / "k")
    (tmp_path / "k").chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_signing_key(tmp_path / "k")


def test_a_public_key_to_sign_with_is_called_so(tmp_path: Path) -> None:
    write_key_pair(tmp_path / "k")
    with pytest.raises(ConfigError, match="is a public key"):
        load_signing_key(tmp_path / "k.pub")


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def test_an_encrypted_key_is_refused_with_a_way_out(tmp_path: Path) -> None:
    key = write_key_pair(tmp_path / "k").key
    secret = BestAvailableEncryption(b"secret")
    data = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, secret)
    with pytest.raises(ConfigError, match="openssl pkey"):
        load_signing_key(_write(tmp_path / "locked", data))


def test_another_kind_of_key_is_refused(tmp_path: Path) -> None:
    key = generate_private_key(SECP256R1())
    data = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with pytest.raises(ConfigError, match="not ed25519"):
        load_signing_key(_write(tmp_path / "ec", data))
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    with pytest.raises(ConfigError, match="not ed25519"):
        load_public_key(_write(tmp_path / "ec.pub", public))


@pytest.mark.parametrize("data", [b"", b"words", b"-----BEGIN PRIVATE KEY-----\n", bytes(70_000)])
def test_a_file_that_is_no_key_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ConfigError, match="signing key"):
        load_signing_key(_write(tmp_path / "k", data))


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_signing_key(tmp_path / "k")
