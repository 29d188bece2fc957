"""Images on disk as sources: OCI layouts, tars of them, containerd's content store. Read only.

Formats: image-spec, image-layout.md. What is read is held to its digest and length like anything
that a registry serves; a layer is held to its digest by whoever indexes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tarfile
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from snapshotter.content import BlobRef, Digest
from snapshotter.errors import CorruptError, NotFoundError, RefusedError, UnavailableError
from snapshotter.oci.documents import (
    DOCUMENT_LIMIT_BYTES,
    OCI_INDEX,
    Descriptor,
    check_content,
    digest_of,
    objects,
    parse_descriptor,
    parse_object,
)
from snapshotter.oci.manifest import may_be_image
from snapshotter.oci.reference import Reference
from snapshotter.oci.resolver import FetchedManifest

CONTAINERD_STORE = "io.containerd.content.v1.content"
INDEX_JSON = "index.json"
REF_NAME = "org.opencontainers.image.ref.name"
_CONTAINERD_NAME = "io.containerd.image.name"
_PIECE_BYTES = 1024 * 1024
_MEMBER_LIMIT = 100_000


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of an open file that are one file of the layout; to be closed with it."""

    file: BinaryIO
    offset: int
    size_bytes: int


class Files(Protocol):
    """The files of a layout, by their names in it."""

    where: str

    def open(self, name: str) -> Part:
        """NotFoundError if there is no such file; the file is the caller's to close."""
        ...


class Directory:
    """A layout in a directory."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._path = path

    def open(self, name: str) -> Part:
        path = self._path / name
        try:
            file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
        except (FileNotFoundError, NotADirectoryError):
            raise NotFoundError(f"{self.where}: there is no {name}") from None
        except OSError as error:
            raise UnavailableError(f"{path} can't be read: {error.strerror}") from None
        return Part(file, 0, os.fstat(file.fileno()).st_size)


class Archive:
    """A layout in an uncompressed tar, read in place."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._path = path
        try:
            with tarfile.open(path, "r:") as archive:
                self._members: dict[str, tuple[int, int]] = {}
                for member in archive:
                    if len(self._members) >= _MEMBER_LIMIT:
                        raise RefusedError(f"{path}: more than {_MEMBER_LIMIT} files")
                    if member.isreg():
                        name = member.name.removeprefix("./")
                        self._members[name] = (member.offset_data, member.size)
        except FileNotFoundError:
            raise NotFoundError(f"there is no {path}") from None
        except tarfile.TarError as error:
            raise RefusedError(
                f"{path} is no plain tar ({error}); if it is compressed, decompress it first"
            ) from None
        except OSError as error:
            raise UnavailableError(f"{path} can't be read: {error.strerror}") from None

    def open(self, name: str) -> Part:
        if name not in self._members:
            raise NotFoundError(f"{self.where}: there is no {name}")
        offset, size = self._members[name]
        return Part(self._path.open("rb"), offset, size)


class LayoutSource:
    """An image's documents and layers out of a layout, as a registry client would give them.

    ``name`` chooses the image by its ``ref.name`` or digest. Without, the only one is taken; if
    there are several, they are taken for the platforms of one image. Artifacts beside it are none.
    """

    def __init__(self, files: Files, name: str = "") -> None:
        self._files = files
        self._name = name

    async def manifest(
        self, reference: Reference, size_bytes: int | None = None
    ) -> FetchedManifest:
        what = f"manifest {reference} in {self._files.where}"
        if reference.digest is None:
            return await asyncio.to_thread(self._top)
        data = await asyncio.to_thread(self._small, _blob_name(reference.digest))
        check_content(data, reference.digest, what, size_bytes)
        return FetchedManifest(data, reference.digest, "")

    async def document(self, blob: BlobRef) -> bytes:
        data = await asyncio.to_thread(self._small, _blob_name(blob.digest))
        check_content(data, blob.digest, f"{self._files.where}: {blob.digest}", blob.size_bytes)
        return data

    async def stream(self, blob: BlobRef) -> AsyncGenerator[bytes, None]:
        part = await asyncio.to_thread(self._files.open, _blob_name(blob.digest))
        with part.file:
            if part.size_bytes != blob.size_bytes:
                raise CorruptError(
                    f"{self._files.where}: {blob.digest} is {part.size_bytes} bytes long, its "
                    f"manifest promises {blob.size_bytes}"
                )
            part.file.seek(part.offset)
            left = part.size_bytes
            while left:
                piece = await asyncio.to_thread(part.file.read, min(left, _PIECE_BYTES))
                if not piece:
                    raise CorruptError(f"{self._files.where}: {blob.digest} is cut")
                left -= len(piece)
                yield piece

    async def entries(self) -> list[Descriptor]:
        """All that the layout's index.json lists."""
        return (await asyncio.to_thread(self._listed))[1]

    async def blob_of(self, entry: Descriptor) -> bytes:
        """A small blob that was listed, held to its descriptor."""
        return await self.document(BlobRef("", entry.digest, entry.size_bytes))

    def _listed(self) -> tuple[bytes, list[Descriptor]]:
        what = f"{self._files.where}: {INDEX_JSON}"
        data = self._small(INDEX_JSON)
        entries = objects(parse_object(data, what), "manifests", what)
        return data, [parse_descriptor(entry, what) for entry in entries]

    def _top(self) -> FetchedManifest:
        what = f"{self._files.where}: {INDEX_JSON}"
        data, listed = self._listed()
        entries = [entry for entry in listed if may_be_image(entry)]
        if self._name:
            found = [entry for entry in entries if self._name in _names(entry)]
            if not found:
                raise NotFoundError(f"{what} names no image {self._name!r}")
            entries = found[:1]
        if not entries:
            raise NotFoundError(f"{what} lists no image")
        if len(entries) > 1:
            return FetchedManifest(data, digest_of(data), OCI_INDEX)
        chosen = self._small(_blob_name(entries[0].digest))
        check_content(chosen, entries[0].digest, what, entries[0].size_bytes)
        return FetchedManifest(chosen, entries[0].digest, entries[0].media_type)

    def _small(self, name: str) -> bytes:
        part = self._files.open(name)
        with part.file:
            if part.size_bytes > DOCUMENT_LIMIT_BYTES:
                raise RefusedError(f"{self._files.where}: {name} is too long for a document")
            part.file.seek(part.offset)
            return part.file.read(part.size_bytes)


def open_layout(kind: str, text: str) -> LayoutSource:
    """The source ``oci:PATH[:NAME]``, ``oci-archive:PATH[:NAME]`` or ``containerd:DIRECTORY``."""
    path, name = _split(text)
    if kind == "oci-archive":
        return LayoutSource(Archive(path), name)
    if kind == "containerd":
        inner = path / CONTAINERD_STORE
        return LayoutSource(Directory(inner if inner.is_dir() else path), name)
    return LayoutSource(Directory(path), name)


def _split(text: str) -> tuple[Path, str]:
    """Path and name: a path that is there is meant as a whole."""
    with contextlib.suppress(OSError):
        if Path(text).exists():
            return Path(text), ""
    path, at, digest = text.partition("@")
    if at:
        return Path(path), digest
    path, colon, name = text.rpartition(":")
    return (Path(path), name) if colon else (Path(text), "")


def _names(entry: Descriptor) -> set[str]:
    """By what an image of a layout may be asked for."""
    keys = (REF_NAME, _CONTAINERD_NAME)
    return {str(entry.digest), *(entry.annotations.get(key, "") for key in keys)}


def _blob_name(digest: Digest) -> str:
    return f"blobs/{digest.algorithm}/{digest.hex}"
