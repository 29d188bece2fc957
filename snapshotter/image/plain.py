"""The stream of a layer that is stored as plain tar: what goes in comes out."""

from __future__ import annotations

from snapshotter.image.stream import RestartPoint


class StoredStream:
    """A PlainStream that copies; every offset is a restart point, so none is recorded."""

    def __init__(self, *, chunk_bytes: int = 0, at: RestartPoint | None = None) -> None:
        self.in_offset = 0 if at is None else at.in_offset
        self.out_offset = 0 if at is None else at.out_offset
        self._chunk_bytes = chunk_bytes
        self._ends: list[int] = []

    def step(self, data: memoryview, out: memoryview) -> tuple[int, int]:
        count = min(len(data), len(out))
        out[:count] = data[:count]
        if self._chunk_bytes:
            first = self.out_offset // self._chunk_bytes + 1
            last = (self.out_offset + count) // self._chunk_bytes
            shift = self.in_offset - self.out_offset
            self._ends.extend(n * self._chunk_bytes + shift for n in range(first, last + 1))
        self.in_offset += count
        self.out_offset += count
        return count, count

    def take_ends(self) -> list[int]:
        ends, self._ends = self._ends, []
        return ends

    def take_points(self) -> list[RestartPoint]:
        return []

    def finish(self) -> None:
        """A plain blob may end anywhere; whether its tar may is the scanner's to say."""

    def memory_bytes(self) -> int:
        return 0
