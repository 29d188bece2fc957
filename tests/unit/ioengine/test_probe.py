"""What must hold of the probe: true findings, a reason and a way out for each denial."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from ioengine.engine import IoEngine
from ioengine.probe import choose_engine, explain_io_uring, probe, probe_direct, probe_io_uring


@dataclass(frozen=True)
class Lazy:
    path: str | None
    reasons: Sequence[str]


async def round_trip(engine: IoEngine, path: Path) -> bytes:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        async with engine.buffers().take() as buffer:
            buffer.memory[:4] = b"data"
            await engine.write(fd, buffer, 0, 4, sync=True)
            buffer.memory[:4] = bytes(4)
            return bytes(buffer.memory[: await engine.read(fd, buffer, 0, 4)])
    finally:
        os.close(fd)
        await engine.close()


def test_a_report_leaves_nothing_behind(tmp_path: Path) -> None:
    report = probe(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert report.kernel == os.uname().release
    assert report.lazy is None
    assert report.direct.allowed == (report.direct_alignment_bytes > 0)
    assert report.direct.reason
    assert report.io_uring.reason


def test_the_lazy_data_path_is_asked_for_the_same_directory(tmp_path: Path) -> None:
    asked: list[Path] = []

    def lazy(root: Path) -> Lazy:
        asked.append(root)
        return Lazy(None, ["no such kernel"])

    report = probe(tmp_path, lazy)
    assert asked == [tmp_path]
    assert report.lazy == Lazy(None, ["no such kernel"])


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        probe(tmp_path / "missing")


def test_a_kill_in_the_middle_of_it_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[Path] = []
    monkeypatch.setattr("ioengine.probe.try_ring", lambda fd: named.extend(tmp_path.iterdir()))
    finding = probe_io_uring(tmp_path)
    assert finding.allowed or "works" not in finding.reason
    assert named == []


async def test_what_cannot_be_tried_is_no_reason_to_have_no_engine(tmp_path: Path) -> None:
    choice = choose_engine(tmp_path / "missing", buffer_count=1)
    assert choice.engine.name == "threads"
    assert "can't be tried" in choice.reason
    await choice.engine.close()


def test_direct_io_is_tried_not_guessed(tmp_path: Path) -> None:
    finding, alignment_bytes = probe_direct(tmp_path)
    assert alignment_bytes in ((512, 4096) if finding.allowed else (0,))
    assert str(tmp_path) in str(finding)


@pytest.mark.parametrize(
    ("number", "killed_by", "disabled", "seccomp", "reason", "way_out"),
    [
        (errno.ENOSYS, 0, None, False, "has no io_uring", "CONFIG_IO_URING"),
        (errno.EPERM, 0, 2, False, "io_uring_disabled=2 denies io_uring to everybody", "0"),
        (errno.EPERM, 0, 1, True, "without CAP_SYS_ADMIN", "0"),
        (errno.EPERM, 0, 0, True, "seccomp filter denies", "seccomp profile"),
        (errno.EPERM, 0, None, False, "security module denies", "policy"),
        (errno.EACCES, 0, 0, False, "security module denies", "policy"),
        (errno.ENOMEM, 0, 0, False, "locked memory", "LimitMEMLOCK"),
        (errno.EMFILE, 0, 0, False, "Too many open files", ""),
        (0, signal.SIGSYS, 0, True, "kills io_uring_setup (SIGSYS)", "SystemCallFilter"),
    ],
)
def test_each_denial_has_its_words(
    number: int, killed_by: int, disabled: int | None, seccomp: bool, reason: str, way_out: str
) -> None:
    finding = explain_io_uring(number, killed_by, disabled, seccomp)
    assert not finding.allowed
    assert reason in finding.reason
    assert way_out in finding.way_out


async def test_the_choice_follows_the_probe_and_says_why(tmp_path: Path) -> None:
    choice = choose_engine(tmp_path, buffer_count=2)
    assert choice.engine.name == ("uring" if probe_io_uring(tmp_path).allowed else "threads")
    assert "io_uring" in choice.reason
    assert await round_trip(choice.engine, tmp_path / "file") == b"data"


async def test_threads_can_be_asked_for(tmp_path: Path) -> None:
    choice = choose_engine(tmp_path, prefer="threads", buffer_count=2)
    assert choice.engine.name == "threads"
    assert "configuration" in choice.reason
    assert await round_trip(choice.engine, tmp_path / "file") == b"data"
