"""Where an index on the shelf came from: a small file beside it, ``<hex>.from``.

No such file: this node built the index from bytes that had the layer's digest. Nothing foreign may
ever be without one, so it is written before a foreign index appears and removed after it is gone;
where nobody vouches for it only with the view too, for that has bytes which the index let in.
A file that can't be read is one of an index that nobody vouches for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from ioengine.directories import sync_directory, write_whole
from snapshotter.content import BlobRef, Digest
from snapshotter.errors import InvalidArgumentError

PROVENANCE_SUFFIX = ".from"
REPOSITORIES_KEPT = 64
WINDOWS_SOURCES = 4
_LIMIT_BYTES = 64 * 1024


class Origin(StrEnum):
    """Who made an index, and who says that it is right."""

    HERE = "here"
    SIGNED = "signed"
    REGISTRY = "registry"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Provenance:
    """``key`` is the id of the key that signed it, ``artifact`` the manifest that brought it;
    ``view`` is what its layer is said to unpack to. ``lost``: the index was here and has gone, and
    bytes that it let in may be here yet.

    ``repositories`` have offered this very index (its file has the digest ``index``), with its
    windows file, ``windows``. ``compared``: it was derived again from the layer's
    verified bytes, and is what this node would have built.
    """

    origin: Origin
    key: str = ""
    artifact: Digest | None = None
    index: Digest | None = None
    repositories: tuple[str, ...] = ()
    windows: BlobRef | None = None
    compared: bool = False
    view: Digest | None = None
    lost: bool = False

    @property
    def lingers(self) -> bool:
        """Whether it may have let bytes in that nobody vouches for, though it is not here."""
        return not self.vouched and (self.lost or self.origin is Origin.UNKNOWN)

    @property
    def vouched(self) -> bool:
        """Whether anybody says that the index is right, trusted or not."""
        return self.own or self.origin is Origin.SIGNED

    @property
    def own(self) -> bool:
        """Whether this node knows by itself that the index is right."""
        return self.origin is Origin.HERE or self.compared

    @property
    def windows_at(self) -> tuple[BlobRef, ...]:
        """Where the windows file can be had, as far as it isn't here."""
        if self.windows is None:
            return ()
        others = (replace(self.windows, repository=name) for name in self.repositories)
        return tuple(dict.fromkeys((self.windows, *others)))[:WINDOWS_SOURCES]

    def offered_by(self, repository: str) -> Provenance:
        """The same, known to come from ``repository`` too."""
        known = tuple(dict.fromkeys((*self.repositories, repository)))
        return replace(self, repositories=known[:REPOSITORIES_KEPT])


BUILT_HERE = Provenance(Origin.HERE)


def encode(provenance: Provenance) -> bytes:
    """The file's text."""
    windows = provenance.windows
    document = {
        "origin": provenance.origin.value,
        "key": provenance.key,
        "artifact": _text(provenance.artifact),
        "index": _text(provenance.index),
        "repositories": list(provenance.repositories),
        "windows": None
        if windows is None
        else {
            "repository": windows.repository,
            "digest": str(windows.digest),
            "size": windows.size_bytes,
        },
        "compared": provenance.compared,
        "view": _text(provenance.view),
        "lost": provenance.lost,
    }
    return json.dumps(document, indent=1).encode()


def _text(digest: Digest | None) -> str | None:
    return None if digest is None else str(digest)


def decode(data: bytes) -> Provenance:
    """What a file says; of one that is damaged, that nobody vouches for the index."""
    try:
        document = json.loads(data)
        windows = document["windows"]
        return Provenance(
            Origin(document["origin"]),
            str(document["key"]),
            _digest(document["artifact"]),
            _digest(document["index"]),
            tuple(str(name) for name in document["repositories"]),
            None if windows is None else _blob(windows),
            document["compared"] is True,
            _digest(document["view"]),
            document["lost"] is True,
        )
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
        InvalidArgumentError,
    ):
        return Provenance(Origin.UNKNOWN)


def _digest(text: str | None) -> Digest | None:
    return None if text is None else Digest.parse(text)


def _blob(document: dict[str, Any]) -> BlobRef:
    return BlobRef(
        str(document["repository"]), Digest.parse(document["digest"]), int(document["size"])
    )


def read_provenance(index: Path) -> Provenance:
    """Of the index at this path."""
    try:
        with index.with_suffix(PROVENANCE_SUFFIX).open("rb") as file:
            return decode(file.read(_LIMIT_BYTES))
    except FileNotFoundError:
        return BUILT_HERE
    except OSError:
        return Provenance(Origin.UNKNOWN)


def write_provenance(index: Path, provenance: Provenance) -> None:
    """Say durably where the index at this path comes from; before it appears. Raises OSError."""
    write_whole(index.with_suffix(PROVENANCE_SUFFIX), encode(provenance), synced=True)
    sync_directory(index.parent)


def remove_strays(directory: Path) -> None:
    """Of indexes that are not there, a killed daemon's; for a start only."""
    for path in directory.glob(f"*{PROVENANCE_SUFFIX}"):
        if not path.with_suffix(".idx").exists() and not read_provenance(path).lingers:
            path.unlink(missing_ok=True)
