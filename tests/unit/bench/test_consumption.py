"""What a process costs, read of /proc: itself and what it started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bench.consumption import family, peak_bytes, processor_s, reset_peak

CHILD = "import sys; held = bytearray(50_000_000); print('up', flush=True); sys.stdin.read()"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


@pytest.fixture
def started() -> Iterator[int]:
    """A process with a child that holds 50 MB."""
    words = [sys.executable, "-c", PARENT]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process.pid


def test_a_family_is_a_process_and_what_it_started(started: int) -> None:
    found = family(started)
    assert found[0] == started and len(found) == 2
    assert set(found) < set(family(os.getpid()))


def test_the_peak_is_that_of_all_of_them(started: int) -> None:
    assert peak_bytes(family(started)) > 50_000_000 > peak_bytes([started])


def test_a_peak_can_begin_anew() -> None:
    before = peak_bytes([os.getpid()])
    held = bytearray(100_000_000)
    assert peak_bytes([os.getpid()]) > before + 50_000_000
    del held
    reset_peak([os.getpid()])
    assert peak_bytes([os.getpid()]) < before + 50_000_000


def test_time_that_was_used_counts(started: int) -> None:
    assert processor_s(family(started)) > 0


def test_a_process_that_is_gone_costs_nothing() -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
        assert processor_s([gone.pid]) >= 0
    assert family(gone.pid) == [gone.pid]
    assert (processor_s([gone.pid]), peak_bytes([gone.pid])) == (0, 0)
