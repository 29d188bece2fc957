"""Where io_uring is denied the thread engine answers, and the reason is told.

A child process denies it to itself by a seccomp filter, as container runtimes do, or limits the
memory that a ring may pin.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ERRNO_EPERM = 0x00050000 | 1
ERRNO_ENOSYS = 0x00050000 | 38
KILL_PROCESS = 0x80000000

PROGRAM = """
import asyncio, ctypes, json, os, resource, struct, sys
from pathlib import Path

from ioengine.probe import choose_engine, probe


def deny(action):
    # seccomp(2): load the number of the call; io_uring_setup (425 everywhere) gets `action`.
    code = b"".join(
        struct.pack("=HBBI", *line)
        for line in [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (6, 0, 0, action), (6, 0, 0, 0x7FFF0000)]
    )
    lines = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("@HP", 4, ctypes.addressof(lines)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0


def limit_locked_memory():
    # CAP_IPC_LOCK (14) lifts the limit: take it out of the effective set by capset(2).
    libc = ctypes.CDLL(None, use_errno=True)
    header = ctypes.create_string_buffer(struct.pack("=II", 0x20080522, 0), 8)
    sets = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    sets[0] &= ~(1 << 14)
    assert libc.capset(header, sets) == 0
    most = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (512 * 1024, most))


async def main(root, prefer):
    try:
        choice = choose_engine(root, prefer=prefer, buffer_count=1)
    except OSError as error:
        return {"refused": error.strerror}
    engine = choice.engine
    fd = os.open(root / "file", os.O_RDWR | os.O_CREAT, 0o600)
    async with engine.buffers().take() as buffer:
        buffer.memory[:4] = b"data"
        await engine.write(fd, buffer, 0, 4, sync=True)
        count = await engine.read(fd, buffer, 0, 9)
        text = bytes(buffer.memory[:count]).decode()
    await engine.close()
    return {"engine": engine.name, "reason": choice.reason, "text": text}


root = Path(sys.argv[1])
action = int(sys.argv[2])
if action:
    deny(action)
else:
    limit_locked_memory()
answer = asyncio.run(main(root, sys.argv[3]))
answer["allowed"] = probe(root).io_uring.allowed
print(json.dumps(answer))
"""


def run_denied(root: Path, action: int, prefer: str) -> dict[str, object]:
    command = [sys.executable, "-c", PROGRAM, str(root), str(action), prefer]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize(
    ("action", "words"),
    [(ERRNO_EPERM, "denies"), (ERRNO_ENOSYS, "no io_uring"), (KILL_PROCESS, "SIGSYS")],
)
def test_threads_answer_where_the_ring_is_denied(action: int, words: str, tmp_path: Path) -> None:
    answer = run_denied(tmp_path, action, "auto")
    assert answer["engine"] == "threads"
    assert words in str(answer["reason"])
    assert answer["text"] == "data"
    assert answer["allowed"] is False


def test_a_ring_whose_buffers_may_not_be_pinned_works_and_says_so(tmp_path: Path) -> None:
    answer = run_denied(tmp_path, 0, "auto")
    assert answer["text"] == "data"
    if answer["engine"] == "uring":
        assert "unregistered (RLIMIT_MEMLOCK)" in str(answer["reason"])
    else:
        assert "io_uring" in str(answer["reason"])


def test_who_insists_on_the_ring_is_told_why_there_is_none(tmp_path: Path) -> None:
    answer = run_denied(tmp_path, ERRNO_EPERM, "uring")
    assert "io_uring was asked for" in str(answer["refused"])
    assert "denies" in str(answer["refused"])
    assert list(tmp_path.iterdir()) == []
