"""The upkeep of the views: one that fails stops none of the others, and is not logged each turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshotter.chunks.space import QUIET_S, Space, SpaceLimits
from snapshotter.chunks.store import ViewStore
from snapshotter.chunks.view import View
from snapshotter.content import Digest
from tests.unit.chunks.conftest import CHUNK, NEXT_BOOT, Content, Stores

DIGESTS = [Digest("sha256", f"{n:064x}") for n in range(3)]


async def doubtful(stores: Stores) -> tuple[ViewStore, list[View]]:
    """Three views of one chunk each that a power loss left in doubt, in an open store."""
    content = Content(CHUNK)
    killed = await stores.start()
    for digest in DIGESTS:
        view = await killed.open(digest, CHUNK, content.digest)
        await view.write(0, content.chunk(0), demand=True)
        await view.flush()
    store = await stores.start(NEXT_BOOT, SpaceLimits(1 << 20, 0))
    return store, [await store.open(digest, CHUNK, content.digest) for digest in DIGESTS]


@pytest.mark.parametrize("fault", [OSError(5, "it is broken"), ValueError("surprise")])
async def test_a_view_that_fails_keeps_no_other_from_being_proved(
    stores: Stores,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: Exception,
) -> None:
    async def fails(*_: object) -> None:
        raise fault

    store, (first, second, third) = await doubtful(stores)
    ballast = stores.root / "ballast"
    ballast.unlink()
    with monkeypatch.context() as patched:
        patched.setattr(first, "prove", fails)
        patched.setattr(second, "flush", fails)
        for _ in range(3):
            await store.flush()
        assert first.unproved()
        assert not second.unproved() and not third.unproved()
        assert ballast.stat().st_size == 1 << 20
        assert caplog.text.count(f"proving {first.digest} failed") == 1
        assert caplog.text.count(f"flushing {second.digest} failed") == 1
    await store.flush()
    assert not first.unproved()
    assert f"proving {first.digest} does not fail any more" in caplog.text
    await store.close()


async def test_a_view_that_goes_before_its_turn_comes_is_no_fault(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, (first, second, third) = await doubtful(stores)
    flush = first.flush

    async def goes() -> int:
        await store.drop(second.digest)
        await store.release(third.digest)
        return await flush()

    monkeypatch.setattr(first, "flush", goes)
    await store.flush()
    assert "failed" not in caplog.text
    assert [view.digest for view in store.views()] == [first.digest]
    await store.close()


def test_a_disk_that_stays_full_is_said_so_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 100.0
    monkeypatch.setattr("snapshotter.chunks.space.time.monotonic", lambda: now_s)
    space = Space(tmp_path, SpaceLimits())
    for n in range(5):
        space.complain(f"full {n}")
    now_s += QUIET_S
    space.complain("full still")
    assert caplog.messages == ["full 0", "full still"]
