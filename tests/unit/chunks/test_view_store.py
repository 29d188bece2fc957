"""The store keeps what was verified, believes what it may believe, and forgets before removing."""

from __future__ import annotations

import pytest

from snapshotter.chunks.datafile import DiskError
from snapshotter.content import Digest, Extent
from snapshotter.errors import CorruptError, FailedPreconditionError
from tests.unit.chunks.conftest import CHUNK, NEXT_BOOT, VIEW, Content, Stores


@pytest.mark.parametrize("demand", [True, False])
async def test_a_written_chunk_is_readable_and_right(stores: Stores, demand: bool) -> None:
    content = Content(5 * CHUNK + 100)
    store = await stores.start()
    view = await store.open(VIEW, len(content.data), content.digest)
    assert view.missing(Extent(0, 1 << 40)) == [0, 1, 2, 3, 4, 5]
    assert await view.write(2, content.chunk(2), demand=demand)
    assert not await view.write(2, content.chunk(2), demand=demand)
    assert await view.write_run(4, [content.chunk(4), content.chunk(5)], demand=demand) == 2
    assert view.missing(Extent(2 * CHUNK, CHUNK)) == []
    assert view.missing(Extent(0, len(content.data))) == [0, 1, 3]
    assert view.readable_count == 3
    raw = view.path.read_bytes()
    assert raw[2 * CHUNK : 3 * CHUNK] == content.chunk(2)
    assert raw[4 * CHUNK : len(content.data)] == content.data[4 * CHUNK :]
    await store.close()


@pytest.mark.parametrize("demand", [True, False])
async def test_wrong_bytes_are_never_written(stores: Stores, demand: bool) -> None:
    content = Content(3 * CHUNK)
    store = await stores.start()
    view = await store.open(VIEW, len(content.data), content.digest)
    for wrong in (content.chunk(0), content.chunk(1)[:-1], content.chunk(1) + b"x", b""):
        with pytest.raises(CorruptError, match="chunk 1 of sha256:ab"):
            await view.write(1, wrong, demand=demand)
    assert not view.is_readable(1)
    assert view.path.read_bytes() == bytes(3 * CHUNK)
    await store.close()


async def test_a_killed_daemon_loses_nothing_within_a_boot(stores: Stores) -> None:
    content = Content(4 * CHUNK)
    first = await stores.start()
    view = await first.open(VIEW, len(content.data), content.digest)
    await view.write(0, content.chunk(0), demand=True)
    second = await stores.start()
    again = await second.open(VIEW, len(content.data), content.digest)
    assert again.missing(Extent(0, 4 * CHUNK)) == [1, 2, 3]
    assert again.unproved() == []
    await second.close()
    await first.close()


async def test_after_a_crash_of_the_machine_only_synced_chunks_count(stores: Stores) -> None:
    content = Content(4 * CHUNK)
    first = await stores.start()
    view = await first.open(VIEW, len(content.data), content.digest)
    await view.write(0, content.chunk(0), demand=True)
    assert await view.flush() == 1
    await view.write(1, content.chunk(1), demand=True)
    assert (view.readable_count, view.durable_count) == (2, 1)
    second = await stores.start(NEXT_BOOT)
    again = await second.open(VIEW, len(content.data), content.digest)
    assert again.missing(Extent(0, 4 * CHUNK)) == [1, 2, 3]
    assert again.unproved() == [0]
    await second.close()
    await first.close()


async def test_a_doubted_chunk_that_is_wrong_is_missing_again(stores: Stores) -> None:
    content = Content(3 * CHUNK)
    first = await stores.start()
    view = await first.open(VIEW, len(content.data), content.digest)
    await view.write_run(0, [content.chunk(n) for n in range(3)], demand=True)
    await view.flush()
    with view.path.open("r+b") as file:
        file.seek(CHUNK + 7)
        file.write(b"rot")
    second = await stores.start(NEXT_BOOT)
    again = await second.open(VIEW, len(content.data), content.digest)
    completed: list[bool] = []
    again.when_complete(lambda: completed.append(True))
    assert again.readable_count == 3
    assert not again.complete
    report = await again.prove(100)
    assert (report.proved, report.lost) == (2, 1)
    assert again.missing(Extent(0, 3 * CHUNK)) == [1]
    assert completed == []
    await again.write(1, content.chunk(1), demand=True)
    assert again.whole
    assert not again.complete
    assert completed == []
    await again.flush()
    assert again.complete
    assert completed == [True]
    third = await stores.start(b"c" * 16)
    assert (await third.open(VIEW, len(content.data), content.digest)).readable_count == 3
    for store in (third, second, first):
        await store.close()


async def test_a_view_closed_in_order_is_not_doubted_after_a_reboot(stores: Stores) -> None:
    content = Content(3 * CHUNK)
    first = await stores.start()
    view = await first.open(VIEW, len(content.data), content.digest)
    await view.write_run(0, [content.chunk(n) for n in range(3)], demand=False)
    await first.close()
    second = await stores.start(NEXT_BOOT)
    again = await second.open(VIEW, len(content.data), content.digest)
    assert again.complete
    third = await stores.start(b"c" * 16)  # a crash meanwhile: nothing was being written
    assert (await third.open(VIEW, len(content.data), content.digest)).complete
    await third.close()
    await second.close()


async def test_a_torn_presence_file_means_that_nothing_is_here(stores: Stores) -> None:
    content = Content(3 * CHUNK)
    store = await stores.start()
    view = await store.open(VIEW, len(content.data), content.digest)
    await view.write(0, content.chunk(0), demand=True)
    await store.close()
    presence = stores.root / "presence" / VIEW.hex
    whole = presence.read_bytes()
    for torn in (
        b"",
        whole[:100],
        whole[:-1],
        b"\0" * 512 + whole[512:],
        whole[:20] + b"\xff" + whole[21:],
    ):
        presence.write_bytes(torn)
        store = await stores.start()
        view = await store.open(VIEW, len(content.data), content.digest)
        assert view.readable_count == 0
        await store.close()


async def test_a_view_is_removed_only_while_no_mount_has_it(stores: Stores) -> None:
    content = Content(2 * CHUNK)
    store = await stores.start()
    view = await store.open(VIEW, len(content.data), content.digest)
    await view.write(0, content.chunk(0), demand=True)
    stores.mounted.add(view.path)
    with pytest.raises(FailedPreconditionError, match="open in a mount"):
        await store.drop(VIEW)
    again = await store.open(VIEW, len(content.data), content.digest)
    assert again.readable_count == 1
    stores.mounted.clear()
    await store.drop(VIEW)
    await store.drop(VIEW)
    assert await store.stored() == []
    assert list((stores.root / "views").iterdir()) == []
    assert (await store.open(VIEW, len(content.data), content.digest)).readable_count == 0
    await store.close()


async def test_a_staged_stream_is_nothing_until_it_is_sealed(stores: Stores) -> None:
    content = Content(5 * CHUNK + 9)
    store = await stores.start()
    staging = store.stage(VIEW)
    staging.sink(0, memoryview(content.data)[:7000])
    killed = await stores.start()  # what a killed daemon leaves
    assert await killed.stored() == []
    assert list((stores.root / "staging").iterdir()) == []
    staging = killed.stage(VIEW)
    staging.sink(0, memoryview(content.data)[:7000])
    staging.sink(7000, memoryview(content.data)[7000:])
    view = await killed.seal(staging, len(content.data), content.digest)
    assert view.complete
    assert view.durable_count == view.chunk_count
    assert view.path.read_bytes()[: len(content.data)] == content.data
    assert list((stores.root / "staging").iterdir()) == []
    await killed.close()
    await store.close()


async def test_sealing_over_an_open_view_adds_only_what_it_lacks(stores: Stores) -> None:
    content, other = Content(5 * CHUNK + 9), Content(5 * CHUNK + 9, seed=2)
    store = await stores.start()
    view = await store.open(VIEW, len(content.data), content.digest)
    await view.write(3, content.chunk(3), demand=True)
    staging = store.stage(VIEW)
    staging.sink(0, memoryview(other.data))
    with pytest.raises(CorruptError):
        await store.seal(staging, len(content.data), content.digest)
    assert view.readable_count == 1
    staging = store.stage(VIEW)
    staging.sink(0, memoryview(content.data))
    assert await store.seal(staging, len(content.data), content.digest) is view
    assert view.complete
    assert view.path.read_bytes()[: len(content.data)] == content.data
    await store.close()


async def test_an_empty_view_is_complete(stores: Stores) -> None:
    store = await stores.start()
    view = await store.open(VIEW, 0, lambda number: b"")
    assert view.complete
    assert view.missing(Extent(0, 100)) == []
    await store.close()


async def test_the_presence_file_is_what_the_guard_maps(stores: Stores) -> None:
    content = Content(20 * CHUNK)
    store = await stores.start()
    view = await store.open(VIEW, len(content.data), content.digest)
    await view.write(9, content.chunk(9), demand=True)
    presence = store.root / "presence" / VIEW.hex
    assert presence.read_bytes()[4096:4099] == bytes([0, 2, 0])
    assert bytes(view.readable_bitmap) == bytes([0, 2, 0])
    assert view.inode == view.path.stat().st_ino
    await store.close()


async def test_halves_left_by_a_kill_are_removed_unless_mounted(stores: Stores) -> None:
    store = await stores.start()
    await store.close()
    for name in ("views/aa", "views/bb", "presence/cc"):
        (stores.root / name).write_bytes(b"x")
    stores.mounted.add(stores.root / "views/aa")
    store = await stores.start()
    assert sorted(path.name for path in stores.root.glob("*/??")) == ["aa"]
    await store.close()


async def test_what_is_no_file_of_ours_stops_nobody_but_who_needs_that_path(
    stores: Stores,
) -> None:
    content = Content(CHUNK)
    for folder in ("views", "presence", "staging"):
        (stores.root / folder / "foreign" / "thing").mkdir(parents=True)
    (stores.root / "presence" / VIEW.hex).mkdir()
    (stores.root / "views" / VIEW.hex).touch()
    store = await stores.start()
    assert await store.stored() == []
    assert not await store.whole(VIEW)
    with pytest.raises(DiskError, match=f"presence/{VIEW.hex}.*move that file away"):
        await store.open(VIEW, CHUNK, content.digest)
    (stores.root / "presence" / VIEW.hex).rmdir()
    assert (await store.open(VIEW, CHUNK, content.digest)).readable_count == 0
    await store.close()
    assert (stores.root / "staging" / "foreign" / "thing").is_dir()


async def test_what_a_killed_daemon_had_open_is_opened_again_without_a_sync(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, synced = Content(3 * CHUNK), list[object]()
    killed = await stores.start()
    view = await killed.open(VIEW, 3 * CHUNK, content.digest)
    await view.write(1, content.chunk(1), demand=True)
    store = await stores.start()
    monkeypatch.setattr("snapshotter.chunks.store.sync_directory", synced.append)
    monkeypatch.setattr("os.fdatasync", synced.append)
    monkeypatch.setattr("os.fsync", synced.append)
    again = await store.open(VIEW, 3 * CHUNK, content.digest)
    assert (synced, again.is_readable(1), again.complete) == ([], True, False)
    other = Digest("sha256", "cd" * 32)
    await store.open(other, CHUNK, Content(CHUNK).digest)
    assert synced.count(stores.root / "views") == 1
    assert synced.count(stores.root / "presence") == 1
