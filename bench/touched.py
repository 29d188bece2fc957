"""What a start touched of an image: the pages of its files that the page cache holds after it.

Found without asking any snapshotter: the image is mounted, mincore(2) says of each file which
pages are cached, and the tar of its layer says where in the plain layer they lie. Drop the page
cache before the start; the kernel's own readahead counts, for somebody had to deliver it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.bed.image import Image, Layer, blob_path
from bench.bed.process import BedError

PAGE_BYTES = mmap.PAGESIZE
UNPACKERS = {"gzip": ["pigz", "-dc"], "zstd": ["zstd", "-dcq"], "tar": ["cat"]}
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True)
class Place:
    """Where the bytes of a file lie: the number of its layer, and the offset in the plain layer."""

    layer: int
    offset: int


def cached_pages(path: Path) -> list[int]:
    """Numbers of the pages of a file that are in the page cache; nothing is read for it."""
    with path.open("rb") as file:
        length = os.fstat(file.fileno()).st_size
        if not length:
            return []
        address = LIBC.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        if address == FAILED:
            raise BedError(f"{path}: mmap: {os.strerror(ctypes.get_errno())}")
        pages = -(-length // PAGE_BYTES)
        found = ctypes.create_string_buffer(pages)
        failed = LIBC.mincore(address, length, found)
        LIBC.munmap(address, length)
        if failed:
            raise BedError(f"{path}: mincore: {os.strerror(ctypes.get_errno())}")
    return [number for number, byte in enumerate(found.raw[:pages]) if byte & 1]


def cached_files(root: Path) -> Iterator[tuple[str, list[int]]]:
    """Regular files below ``root`` of which pages are cached, by their names in the image."""
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode) and (pages := cached_pages(Path(path))):
                yield os.path.relpath(path, root), pages


def places(image: Image) -> dict[str, Place]:
    """Where the files of an image lie; a file of a higher layer hides those below it."""
    found: dict[str, Place] = {}
    for number, layer in enumerate(image.layers):
        found.update(layer_places(blob_path(image.folder, layer.digest), layer, number))
    return found


def layer_places(blob: Path, layer: Layer, number: int) -> dict[str, Place]:
    found: dict[str, Place] = {}
    kind = layer.media_type.rpartition("+")[2] if "+" in layer.media_type else "tar"
    words = [*UNPACKERS[kind], str(blob)]
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE) as unpacker,
        tarfile.open(fileobj=unpacker.stdout, mode="r|") as archive,
    ):
        for member in archive:
            name = os.path.normpath(member.name)
            if member.islnk():
                found[name] = found[os.path.normpath(member.linkname)]
            elif member.isreg():
                found[name] = Place(number, member.offset_data)
    return found


@dataclass(frozen=True)
class Touched:
    """``files`` in the order of the image's tree, and ranges of plain bytes by layer number."""

    files: list[tuple[str, Place]]
    ranges: dict[int, list[tuple[int, int]]]

    @property
    def plain_bytes(self) -> int:
        return sum(length for found in self.ranges.values() for _, length in found)

    def chunks(self, layer: int, chunk_bytes: int) -> list[int]:
        """Chunks of a layer that hold a touched byte."""
        found: set[int] = set()
        for offset, length in self.ranges.get(layer, []):
            found.update(range(offset // chunk_bytes, -(-(offset + length) // chunk_bytes)))
        return sorted(found)


def touched(root: Path, image: Image) -> Touched:
    """What is cached of the image that is mounted at ``root``."""
    known = places(image)
    files: list[tuple[str, Place]] = []
    ranges: dict[int, list[tuple[int, int]]] = {}
    for name, pages in cached_files(root):
        place = known.get(name)
        if place is None:
            raise BedError(f"{name}: in no layer of {image.name}")
        files.append((name, place))
        size = (root / name).stat().st_size
        for page in pages:
            start = page * PAGE_BYTES
            length = min(PAGE_BYTES, size - start)
            ranges.setdefault(place.layer, []).append((place.offset + start, length))
    return Touched(files, ranges)
