"""A bitmap over memory that C threads read at the same time: bit n is byte n / 8, bit n % 8.

Setting a bit is atomic and has release order, so whoever sees it also sees the bytes that were
written before it. It does not know what a bit stands for.
"""

from __future__ import annotations

from collections.abc import Iterator
from mmap import mmap
from typing import Any

from ioengine._native import ffi, lib


class Bitmap:
    """``count`` bits in ``memory`` from ``offset_bytes`` on; the memory must outlive the bitmap.

    Safe to use from several threads. ``close()`` lets go of the memory, so that it can be unmapped;
    who uses the bitmap after that gets a ValueError.
    """

    def __init__(self, memory: mmap | bytearray, offset_bytes: int, count: int) -> None:
        length = (count + 7) // 8
        if offset_bytes < 0 or count < 0 or offset_bytes + length > len(memory):
            raise ValueError(f"{count} bits at byte {offset_bytes} outrun {len(memory)} bytes")
        self._view = memoryview(memory)[offset_bytes : offset_bytes + length]
        self._bits: Any = ffi.from_buffer("uint8_t[]", self._view, require_writable=True)
        self.count = count

    @property
    def memory(self) -> memoryview:
        """The bytes of the bitmap, live."""
        return self._view

    def get(self, number: int) -> bool:
        """Whether bit ``number`` is set; IndexError outside the bitmap."""
        if not 0 <= number < self.count:
            raise IndexError(f"bit {number} of {self.count}")
        return bool(self._view[number >> 3] >> (number & 7) & 1)

    def set(self, first: int, count: int = 1) -> None:
        """Set ``count`` bits from ``first`` on; IndexError outside the bitmap."""
        lib.ember_bits_set(self._checked(first, count), first, count)

    def clear(self, first: int, count: int = 1) -> None:
        """Clear ``count`` bits from ``first`` on; IndexError outside the bitmap."""
        lib.ember_bits_clear(self._checked(first, count), first, count)

    def zeros(self, first: int, end: int) -> Iterator[int]:
        """The clear bits in [first, end), rising; each is looked at when it is asked for."""
        at = first - 1
        while True:
            at = lib.ember_bits_next_zero(self._checked(first, end - first), at + 1, end)
            if at < 0:
                return
            yield at

    def all(self, first: int, end: int) -> bool:
        """Whether every bit in [first, end) is set; true for an empty range."""
        bits = self._checked(first, end - first)
        return bool(lib.ember_bits_next_zero(bits, first, end) < 0)

    def population(self) -> int:
        """How many bits are set."""
        return int.from_bytes(self.snapshot(), "little").bit_count()

    def snapshot(self) -> bytes:
        """A copy of the bytes."""
        return bytes(self._view)

    def close(self) -> None:
        """Let go of the memory. BufferError while another thread is in a call: it keeps it."""
        self._bits = None
        self._view.release()

    def _checked(self, first: int, count: int) -> Any:
        """The memory, held for as long as the caller has it."""
        bits = self._bits
        if bits is None:
            raise ValueError("the bitmap is closed")
        if first < 0 or count < 0 or first + count > self.count:
            raise IndexError(f"bits {first}..{first + count} of {self.count}")
        return bits
