"""A layer of three files, and a scanner that only keeps what it is fed, or refuses."""

from __future__ import annotations

from pathlib import Path

from snapshotter.content import Digest
from snapshotter.errors import (
    RefusedError,
)
from snapshotter.image.scan import LayerMetadata
from tests.unit.image.layers import (
    sha256,
    tar,
    text,
)

PLAIN = tar([("a/file", text(50_000)), ("b", b"x" * 1000), ("empty", b"")])


class FakeScanner:
    """Keeps what it is fed; refuses at ``refuse_at`` plain bytes, or at the end."""

    def __init__(self, refuse_at: int | None = None, *, refuse_end: bool = False) -> None:
        self.data = bytearray()
        self._refuse_at = refuse_at
        self._refuse_end = refuse_end

    def feed(self, data: memoryview) -> None:
        self.data += data
        if self._refuse_at is not None and len(self.data) > self._refuse_at:
            raise RefusedError("entry 'x': points out of the root")

    def finish(self, view: Digest, view_bytes: int) -> LayerMetadata:
        if self._refuse_end:
            raise RefusedError("entry 'x': the archive ends inside it")
        assert sha256(bytes(self.data)) == view
        assert len(self.data) == view_bytes
        return LayerMetadata(b"metadata of " + view.hex.encode(), True, 3)


def leftovers(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix not in {".idx", ".win"})
