"""What a start touched: places in the plain layer by the tar alone, and pages by the page cache."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from bench.bed.image import Image, Layer, blob_path
from bench.touched import PAGE_BYTES, Place, Touched, cached_pages, places, touched


def add(archive: tarfile.TarFile, name: str, content: bytes = b"", link: str = "") -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    if link:
        member.type, member.linkname = tarfile.LNKTYPE, link
    archive.addfile(member, io.BytesIO(content))


@pytest.fixture
def image(tmp_path: Path) -> Image:
    """Two plain layers; the second hides a file of the first."""
    layers = []
    (tmp_path / "blobs" / "sha256").mkdir(parents=True)
    for number in range(2):
        digest = f"sha256:{number:064}"
        with tarfile.open(blob_path(tmp_path, digest), "w", format=tarfile.PAX_FORMAT) as archive:
            if number == 0:
                add(archive, "./low", b"l" * 3 * PAGE_BYTES)
                add(archive, "linked", link="./low")
            add(archive, "both", bytes([65 + number]) * 100)
        layers.append(Layer(digest, digest, 1, 1, "application/vnd.oci.image.layer.v1.tar"))
    return Image("bed/x", "plain", tmp_path, "sha256:00", tuple(layers))


def test_files_lie_where_the_tar_has_their_bytes(image: Image) -> None:
    found = places(image)
    assert found["low"] == found["linked"] == Place(0, 512)
    plain = blob_path(image.folder, image.layers[1].digest).read_bytes()
    both = found["both"]
    assert both.layer == 1 and plain[both.offset : both.offset + 100] == b"B" * 100


def test_pages_that_were_read_are_cached_and_others_are_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(64 * PAGE_BYTES))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(descriptor, 10, 7 * PAGE_BYTES)
        found = cached_pages(path)
    finally:
        os.close(descriptor)
    assert 7 in found and len(found) < 64


def test_an_empty_file_has_no_pages(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert cached_pages(tmp_path / "empty") == []


def test_what_is_cached_is_said_in_bytes_of_the_layer(tmp_path: Path, image: Image) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "low").write_bytes(b"l" * (2 * PAGE_BYTES + 1))  # what was written is cached
    what = touched(root, image)
    assert what.files == [("low", Place(0, 512))]
    assert what.ranges == {0: [(512, 4096), (4608, 4096), (8704, 1)]}
    assert what.plain_bytes == 2 * PAGE_BYTES + 1


def test_chunks_are_those_that_a_range_reaches_into() -> None:
    what = Touched([], {3: [(0, 1), (99, 2), (250, 50)]})
    assert what.chunks(3, 100) == [0, 1, 2]
    assert what.chunks(4, 100) == []
