"""A bitmap in shared memory agrees with a plain set of numbers, whatever is done to it."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ioengine.bitmap import Bitmap


@given(
    st.integers(1, 70), st.lists(st.tuples(st.booleans(), st.integers(0, 69), st.integers(0, 70)))
)
def test_a_bitmap_is_a_set_of_numbers(count: int, steps: list[tuple[bool, int, int]]) -> None:
    memory = bytearray(3 + (count + 7) // 8 + 1)
    bitmap, model = Bitmap(memory, 3, count), set[int]()
    for setting, first, length in steps:
        first, length = min(first, count), min(length, count - min(first, count))
        if setting:
            bitmap.set(first, length)
            model |= set(range(first, first + length))
        else:
            bitmap.clear(first, length)
            model -= set(range(first, first + length))
    assert [n for n in range(count) if bitmap.get(n)] == sorted(model)
    assert list(bitmap.zeros(0, count)) == [n for n in range(count) if n not in model]
    assert bitmap.population() == len(model)
    assert bitmap.all(0, count) == (len(model) == count)
    assert memory[:3] == bytes(3)
    assert memory[-1] == 0


def test_bits_outside_are_refused() -> None:
    bitmap = Bitmap(bytearray(2), 0, 10)
    with pytest.raises(IndexError):
        bitmap.get(10)
    with pytest.raises(IndexError):
        bitmap.set(9, 2)
    with pytest.raises(IndexError):
        bitmap.clear(-1, 1)
    with pytest.raises(ValueError, match="outrun"):
        Bitmap(bytearray(2), 1, 10)


def test_threads_that_set_bits_of_one_byte_lose_none() -> None:
    bitmap = Bitmap(bytearray(1000), 0, 8000)

    def every_eighth(start: int) -> None:
        for number in range(start, 8000, 8):
            bitmap.set(number)

    threads = [threading.Thread(target=every_eighth, args=(start,)) for start in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bitmap.population() == 8000


def test_a_closed_bitmap_lets_go_of_its_memory() -> None:
    memory = bytearray(8)
    Bitmap(memory, 0, 64).close()
    memory.extend(b"x")
    assert len(memory) == 9


def test_a_closed_bitmap_says_so_to_whoever_comes_late() -> None:
    """Never a look at memory that is unmapped: that would end the process."""
    bitmap = Bitmap(bytearray(8), 0, 64)
    rising = bitmap.zeros(0, 64)
    assert next(rising) == 0
    bitmap.close()
    for late in (
        lambda: next(rising),
        lambda: list(bitmap.zeros(0, 64)),
        lambda: bitmap.all(0, 64),
        lambda: bitmap.get(3),
        lambda: bitmap.set(3),
        lambda: bitmap.clear(3),
        bitmap.population,
    ):
        with pytest.raises(ValueError, match=r"closed|released"):
            late()
