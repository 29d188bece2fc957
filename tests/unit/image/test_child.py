"""Processes of our own modules: all that they say is heard, and none outlives who waits for it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from snapshotter.errors import DeadlineError
from snapshotter.image.child import SAID_BYTES, run_child
from tests.patience import until


async def test_words_that_come_in_pieces_are_heard_to_their_end() -> None:
    words = "first", "second " * 500, "x" * SAID_BYTES
    status, said = await run_child("tests.unit.image.talker", "\n".join(words), what="it")
    assert (status, said) == (3, "\n".join(words)[:SAID_BYTES].strip())


async def test_how_a_signal_ended_it_is_told() -> None:
    status, _ = await run_child("tests.unit.image.talker", "kill", what="it")
    assert status == -signal.SIGKILL


async def test_it_ends_with_who_waits_for_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    task = asyncio.create_task(run_child("tests.unit.image.talker", f"wait {note}", what="it"))
    assert await asyncio.to_thread(until, lambda: note.exists() and note.read_text() != "")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


async def test_it_is_not_waited_for_too_long(tmp_path: Path) -> None:
    words = f"wait {tmp_path / 'pid'}"
    with pytest.raises(DeadlineError, match="the index is not checked"):
        await run_child("tests.unit.image.talker", words, what="the index", timeout_s=0.2)
