"""Memory that outlives its process: whole values only, whatever is killed when."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ioengine.kept_memory import KeptMemory

PROJECT = Path(__file__).resolve().parents[3]
SAVES = """\
import sys
from ioengine.kept_memory import KeptMemory
memory = KeptMemory(int(sys.argv[1]))
print("saving", flush=True)
for n in range(10**9):
    memory.save(b"%d " % n * (n % 4000))
"""


def again(memory: KeptMemory) -> KeptMemory:
    """What the next process finds."""
    return KeptMemory(os.dup(memory.fileno()))


def test_what_was_saved_last_is_there_for_whoever_has_the_descriptor() -> None:
    memory = KeptMemory.make("test", 4096)
    assert again(memory).load() == b""
    for value in (b"first", b"", b"x" * 4096, b"last"):
        memory.save(value)
        assert memory.load() == value
        assert again(memory).load() == value
    other = again(memory)
    memory.close()
    memory.close()
    assert other.capacity_bytes == 4096
    assert other.load() == b"last"


def test_nothing_stays_of_what_was_saved_before() -> None:
    memory = KeptMemory.make("test", 4096)
    memory.save(b"secret" * 100)
    memory.save(b"x")
    assert b"secret" not in os.pread(memory.fileno(), 16384, 0)


def test_what_is_too_long_is_refused_and_changes_nothing() -> None:
    memory = KeptMemory.make("test", 10)
    memory.save(b"0123456789")
    with pytest.raises(ValueError, match="do not fit"):
        memory.save(b"0123456789a")
    assert memory.load() == b"0123456789"


def test_its_size_is_sealed_and_no_other_file_is_taken_for_one(tmp_path: Path) -> None:
    memory = KeptMemory.make("test", 4096)
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fileno(), size)
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(9000)
        with pytest.raises(OSError):
            KeptMemory(file.fileno())
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, 9000)
    with pytest.raises(OSError, match="not a sealed memory"):
        KeptMemory(unsealed)
    os.close(unsealed)


def test_bytes_that_are_none_of_its_values_count_as_nothing() -> None:
    memory = KeptMemory.make("test", 4096)
    memory.save(b"value")
    os.pwrite(memory.fileno(), random.Random(1).randbytes(8192), 0)
    assert again(memory).load() == b""


def test_a_kill_in_a_save_leaves_a_whole_value() -> None:
    memory = KeptMemory.make("test", 64 * 1024)
    seen = set()
    for seed in range(8):
        child = subprocess.Popen(
            [sys.executable, "-c", SAVES, str(memory.fileno())],
            pass_fds=[memory.fileno()],
            env={**os.environ, "PYTHONPATH": str(PROJECT)},
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"saving\n"
        end_s = time.monotonic() + random.Random(seed).random() / 20
        while time.monotonic() < end_s:
            pass
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        found = again(memory)
        words = found.load().split()
        assert len(set(words)) <= 1
        if words:
            assert len(words) == int(words[0]) % 4000
            seen.add(words[0])
        found.close()
    assert seen
