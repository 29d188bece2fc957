"""Credentials of pulls over a restart: known again, forgotten with their images, never too many."""

from __future__ import annotations

import os

import pytest

from ioengine.kept_memory import KeptMemory
from snapshotter.oci.credentials import Credential, Wanted
from snapshotter.oci.pull_credentials import PullCredentials

IMAGE = "registry.example/team/app:v1"
APP = Wanted("registry.example", "team/app")
ID = "sha256:" + "a" * 64
PAIR = Credential("user", "pass:word")
TOKENS = Credential(identity_token="identity", registry_token="registry")


def memory(capacity_bytes: int = 65536) -> KeptMemory:
    return KeptMemory.make("test", capacity_bytes)


def started(kept: KeptMemory) -> PullCredentials:
    """What a daemon knows that found ``kept``."""
    credentials = PullCredentials()
    credentials.keep_on(KeptMemory(os.dup(kept.fileno())))
    return credentials


async def test_the_next_daemon_knows_what_this_one_was_told() -> None:
    kept = memory()
    first = started(kept)
    for credential in (PAIR, TOKENS):
        assert first.put(IMAGE, credential)
    assert await started(kept).find(APP, fresh=False) == [TOKENS, PAIR]
    assert first.forget(IMAGE, TOKENS)
    assert await started(kept).find(APP, fresh=False) == [PAIR]


async def test_what_was_told_before_there_was_memory_is_kept_too() -> None:
    kept = memory()
    started(kept).put("other.example/image", PAIR)
    late = PullCredentials()
    late.put(IMAGE, PAIR)
    late.keep_on(KeptMemory(os.dup(kept.fileno())))
    assert len(started(kept)) == 2


@pytest.mark.parametrize("named", [IMAGE, ID])
async def test_an_image_is_forgotten_after_a_restart_as_before(named: str) -> None:
    kept = memory()
    first = started(kept)
    for image in (IMAGE, "registry.example/team/app:v2"):
        first.put(image, PAIR)
        first.is_image(ID, image)
    first.put("other.example/kept", PAIR)
    started(kept).forget_image(named)
    assert len(started(kept)) == 1
    assert await started(kept).find(APP, fresh=False) == []
    assert b"team/app" not in os.pread(kept.fileno(), 1 << 20, 0)


async def test_the_latest_are_kept_when_not_all_fit(caplog: pytest.LogCaptureFixture) -> None:
    kept = memory(4096)
    first = started(kept)
    for number in range(100):
        first.put(f"registry.example/team/n{number}", Credential("user", f"secret-{number}" * 5))
        first.is_image(f"sha256:{number:064}", f"registry.example/team/n{number}")
    assert len(first) == 100
    after = started(kept)
    assert 10 < len(after) < 100
    assert await after.find(Wanted("registry.example", "team/n99"), fresh=False)
    assert "secret-" not in caplog.text


async def test_a_secret_longer_than_any_header_costs_nobody_else_theirs() -> None:
    kept = memory(1 << 20)
    first = started(kept)
    first.put(IMAGE, PAIR)
    assert not first.put("registry.example/huge/app", Credential("user", "x" * 900_000))
    assert len(started(kept)) == 1


@pytest.mark.parametrize(
    "found",
    [
        b"\xff",
        b"[]",
        b"{}",
        b'{"version":2}',
        b'{"version":1,"pulls":[[1,2]],"ids":[]}',
        b'{"version":1,"pulls":[[1,[["u","p","",""]]]],"ids":[]}',
        b'{"version":1,"pulls":[["r.example/a",[[1,2,3,4]]]],"ids":[]}',
        b"[" * 60_000,
    ],
)
async def test_what_cannot_be_read_is_no_reason_not_to_start(found: bytes) -> None:
    kept = memory()
    kept.save(found)
    first = started(kept)
    assert len(first) == 0
    first.put(IMAGE, PAIR)
    assert len(started(kept)) == 1
