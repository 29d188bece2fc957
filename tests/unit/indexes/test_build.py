"""Building: each layer once, from the cheapest place, whole or not at all."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import tarfile
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from snapshotter.content import BlobRef, Digest
from snapshotter.errors import ConfigError, CorruptError, EmberError, NotFoundError, RefusedError
from snapshotter.image import index_layout
from snapshotter.image.index import LayerIndex
from snapshotter.image.indexer import IndexLimits
from snapshotter.image.limits import ScanLimits
from snapshotter.image.scan import TarLayerScanner
from snapshotter.image.windows import WindowFile
from snapshotter.indexes.build import Builder, Step, resolve_all
from snapshotter.indexes.cache import IndexCache, default_directory
from snapshotter.indexes.compare import differences
from snapshotter.indexes.layouts import Archive, Directory, LayoutSource, open_layout
from snapshotter.oci.platform import host_platform
from snapshotter.oci.reference import parse_reference
from snapshotter.oci.resolver import resolve_image
from tests.cases.images import (
    Blob,
    ImageCase,
    as_it_is,
    digest,
    entry_of,
    gzipped,
    image,
    index_of,
)
from tests.cases.tars import file, layer
from tests.fakes.short_clock import ShortClock
from tests.indexes import laid_out_otherwise, with_set_uid
from tests.unit.image.layers import index_of as index_of_layer
from tests.unit.image.layers import sha256, text

NAME = parse_reference("example.org/app:1")
BLOBS = [gzipped(layer(file(b"a", text(2_500_000)))), as_it_is(layer(file(b"b", b"x" * 9000)))]
CASE = image("built", BLOBS)


def layout(directory: Path, case: ImageCase = CASE) -> LayoutSource:
    """The image in an OCI layout."""
    blobs = directory / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    for data in (*case.contents, *case.documents):
        (blobs / digest(data)[7:]).write_bytes(data)
    (directory / "index.json").write_bytes(index_of(entry_of(case.documents[-1])))
    return LayoutSource(Directory(directory))


class Counted:
    """A source that counts its readers and can hold them up."""

    def __init__(self, inner: LayoutSource) -> None:
        self._inner = inner
        self.read: list[Digest] = []
        self.gate: asyncio.Event | None = None
        self.both = asyncio.Event()
        self.manifest, self.document = inner.manifest, inner.document

    async def stream(self, blob: BlobRef) -> AsyncGenerator[bytes, None]:
        self.read.append(blob.digest)
        if len(self.read) == len(BLOBS):
            self.both.set()
        if self.gate is not None:
            await self.gate.wait()
        async for piece in self._inner.stream(blob):
            yield piece


async def _build(
    source: Counted, cache: IndexCache, told: Callable[[Step], None] = lambda step: None
) -> list[str]:
    builder = Builder(source, cache, told, parallel=2)
    try:
        resolved = await resolve_image(source, NAME, host_platform())
        return [one.how for one in await builder.build(resolved)]
    finally:
        builder.close()


def _cache(directory: Path) -> IndexCache:
    return IndexCache(directory / "cache", ShortClock())


def _files(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "cache").iterdir() if path.name != "lock")


async def test_every_layer_is_read_once_and_then_never_again(tmp_path: Path) -> None:
    source = Counted(layout(tmp_path / "image"))
    assert await _build(source, _cache(tmp_path)) == ["built", "built"]
    assert await _build(source, _cache(tmp_path)) == ["cached", "cached"]
    assert len(source.read) == 2


async def test_a_layer_that_is_there_twice_is_indexed_once(tmp_path: Path) -> None:
    case = image("twice", [BLOBS[1], BLOBS[1]])
    source = Counted(layout(tmp_path / "image", case))
    assert await _build(source, _cache(tmp_path)) == ["built"]


async def test_builders_at_once_index_each_layer_once(tmp_path: Path) -> None:
    source = Counted(layout(tmp_path / "image"))
    ways = await asyncio.gather(*(_build(source, _cache(tmp_path)) for _ in range(3)))
    assert sorted(how for found in ways for how in found) == ["built"] * 2 + ["cached"] * 4
    assert len(source.read) == 2


@pytest.mark.parametrize("suffix", [".idx", ".win"])
async def test_what_is_torn_in_the_cache_is_made_anew(tmp_path: Path, suffix: str) -> None:
    source = Counted(layout(tmp_path / "image"))
    await _build(source, _cache(tmp_path))
    hurt = tmp_path / "cache" / f"{digest(BLOBS[0].data)[7:]}{suffix}"
    whole = hurt.read_bytes()
    for torn in (whole[:-1], b"", whole[:100] + b"\xff" + whole[101:]):
        hurt.write_bytes(torn)
        assert await _build(source, _cache(tmp_path)) == ["built", "cached"]
        assert hurt.read_bytes() == whole


async def test_a_cancelled_build_leaves_whole_indexes_or_none(tmp_path: Path) -> None:
    source = Counted(layout(tmp_path / "image"))
    source.gate = asyncio.Event()
    task = asyncio.create_task(_build(source, _cache(tmp_path)))
    await asyncio.wait_for(source.both.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert _files(tmp_path) == []
    source.gate.set()
    assert await _build(source, _cache(tmp_path)) == ["built", "built"]


@pytest.mark.parametrize("after", [1, 2, 3])
async def test_a_build_that_is_cancelled_while_a_thread_indexes_ends_after_it(
    tmp_path: Path, after: int
) -> None:
    noise = [random.Random(number).randbytes(6_000_000) for number in range(2)]
    blobs = [gzipped(layer(file(b"f", data))) for data in noise]
    source = Counted(layout(tmp_path / "image", image("noise", blobs)))
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, what: complaints.append(str(what["message"]))
    )
    reading = 0

    def told(step: Step) -> None:
        nonlocal reading
        reading += step.done_bytes > 0
        if reading == after:
            task.cancel()

    task = asyncio.create_task(_build(source, _cache(tmp_path), told))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert _files(tmp_path) == []
    gc.collect()  # an error that nobody took is told when its future goes
    assert complaints == []


async def test_what_a_killed_builder_left_of_a_layer_goes(tmp_path: Path) -> None:
    cache = _cache(tmp_path)
    left = cache.directory / f"{digest(BLOBS[0].data)[7:]}.win.tmp-1-abcd"
    left.write_bytes(b"half")
    await _build(Counted(layout(tmp_path / "image")), cache)
    assert not left.exists()


async def test_a_lying_source_leaves_nothing(tmp_path: Path) -> None:
    source = Counted(layout(tmp_path / "image"))
    path = tmp_path / "image" / "blobs" / "sha256" / digest(BLOBS[0].data)[7:]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=digest(BLOBS[0].data)):
        await _build(source, _cache(tmp_path))
    assert not any(name.startswith(digest(BLOBS[0].data)[7:]) for name in _files(tmp_path))


@pytest.mark.parametrize(
    "blob",
    [
        Blob(b"no tar at all" * 100, digest(b"no tar at all" * 100)),
        Blob(BLOBS[0].data, digest(b"another diffID")),
    ],
    ids=["no tar", "another diffID"],
)
async def test_a_layer_that_cannot_be_indexed_fails_the_build(tmp_path: Path, blob: Blob) -> None:
    source = Counted(layout(tmp_path / "image", image("bad", [blob])))
    with pytest.raises(RefusedError, match=digest(blob.data)):
        await _build(source, _cache(tmp_path))
    assert _files(tmp_path) == []


async def test_an_image_without_layers_has_no_indexes(tmp_path: Path) -> None:
    source = Counted(layout(tmp_path / "image", image("none", [])))
    with pytest.raises(RefusedError, match="nothing to index"):
        await _build(source, _cache(tmp_path))


async def test_the_cache_keeps_what_was_used_last(tmp_path: Path) -> None:
    cache = _cache(tmp_path)
    await _build(Counted(layout(tmp_path / "image")), cache)
    first, second = (cache.directory / f"{digest(b.data)[7:]}.idx" for b in BLOBS)
    for age, path in ((200, second), (100, first), (100, first.with_suffix(".win"))):
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age))
    assert cache.find(sha256(BLOBS[1].data)) is not None  # used again
    assert cache.trim(second.stat().st_size) == 1
    assert _files(tmp_path) == [second.name]
    assert cache.trim() == 0


def test_a_cache_that_others_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(ConfigError, match="others may write there"):
        _cache(tmp_path)


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/ember/index"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/ember/index"),
        ({"HOME": "/h"}, "/h/.cache/ember/index"),
    ],
)
def test_the_cache_is_where_the_desktop_s_rules_say(
    environment: dict[str, str], place: str
) -> None:
    assert default_directory(environment) == Path(place)


async def test_an_archive_is_read_in_place(tmp_path: Path) -> None:
    layout(tmp_path / "image")
    with tarfile.open(tmp_path / "image.tar", "w") as archive:
        archive.add(tmp_path / "image", ".")
    source = Counted(LayoutSource(Archive(tmp_path / "image.tar")))
    assert await _build(source, _cache(tmp_path)) == ["built", "built"]


@pytest.mark.parametrize(
    ("text_of_source", "reason"),
    [
        ("{}/none", "there is no index.json"),
        ("{}/image:v2", "names no image 'v2'"),
        (f"{{}}/image@{digest(b'')}", "names no image"),
    ],
)
async def test_an_image_that_is_not_there_is_named(
    tmp_path: Path, text_of_source: str, reason: str
) -> None:
    layout(tmp_path / "image")
    source = open_layout("oci", text_of_source.format(tmp_path))
    with pytest.raises(NotFoundError, match=reason):
        await source.manifest(NAME)


@pytest.mark.parametrize(
    "document", [b"", b"[]", b"{", json.dumps({"manifests": [{"digest": "../x"}]}).encode()]
)
async def test_a_layout_that_is_none_is_refused(tmp_path: Path, document: bytes) -> None:
    source = layout(tmp_path / "image")
    (tmp_path / "image" / "index.json").write_bytes(document)
    with pytest.raises(EmberError):
        await source.manifest(NAME)


@pytest.mark.parametrize("data", [b"", b"\x1f\x8b not a tar", bytes(100)])
def test_an_archive_that_is_no_tar_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.tar").write_bytes(data)
    with pytest.raises(RefusedError, match="no plain tar"):
        Archive(tmp_path / "x.tar")


async def test_one_image_without_an_index_is_all_platforms(tmp_path: Path) -> None:
    (found,) = await resolve_all(layout(tmp_path / "image"), NAME)
    assert str(found.manifest_digest) == digest(CASE.documents[-1])


def _index(directory: Path, spacing_bytes: int = 64 * 1024) -> LayerIndex:
    directory.mkdir()
    scanner = TarLayerScanner(ScanLimits())
    limits = IndexLimits(spacing_bytes=spacing_bytes)
    return index_of_layer(BLOBS[0].data, None, directory, limits=limits, scanner=scanner)


def test_indexes_that_mean_the_same_do_not_differ(tmp_path: Path) -> None:
    one, sparser = _index(tmp_path / "one"), _index(tmp_path / "sparser", 1024 * 1024)
    assert differences(one, _index(tmp_path / "other")) == []
    assert one.checkpoint_count > sparser.checkpoint_count > 1
    assert differences(one, sparser) == differences(sparser, one) == []


def test_another_layout_of_the_same_files_is_no_difference_and_other_rights_are(
    tmp_path: Path,
) -> None:
    derived = _index(tmp_path / "one")
    windows = WindowFile(tmp_path / "one" / f"{derived.layer.hex}.win")

    def told(change: Callable[[bytes], bytes]) -> list[str]:
        data = change(bytes(derived.data))
        return differences(LayerIndex(memoryview(data), windows, where="it"), derived)

    assert told(laid_out_otherwise) == []
    assert told(with_set_uid) == ["files, modes or links: the metadata image differs"]


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (lambda header: 0, "the digest of chunk 0"),
        (lambda header: header.checkpoints_offset + 60 - index_layout.HEADER_BYTES, "checkpoint"),
    ],
)
def test_a_lie_of_an_index_is_named(
    tmp_path: Path, place: Callable[[index_layout.Header], int], reason: str
) -> None:
    derived = _index(tmp_path / "one")
    header = index_layout.unpack_header(derived.data, "it")
    body = bytearray(derived.data[index_layout.HEADER_BYTES :])
    body[place(header)] ^= 1
    bent = replace(header, body_digest=blake3(body).digest()).pack() + body
    windows = WindowFile(tmp_path / "one" / f"{derived.layer.hex}.win")
    promised = LayerIndex(memoryview(bent), windows, where="it", verify=False)
    found = differences(promised, derived)
    assert any(reason in difference for difference in found), found
