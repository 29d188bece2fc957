"""Which lazy data path does this kernel have for this cache directory? Tried, not guessed.

Each check does the thing itself in a scratch directory under the cache's root and leaves nothing
behind. A read of the probe's own mount is a child process's work: its event is answered here, and
the group is closed in any case, so nothing can hang.
"""

from __future__ import annotations

import errno
import os
import selectors
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ioengine import mounts
from ioengine._native import lib
from ioengine.errors import check
from ioengine.probe import SCRATCH_PREFIX
from ioengine.probe_image import FILE_NAME, probe_image

FANOTIFY = "fanotify"
_VIEW_BYTES = 8192
_ANSWER_S = 10.0
_READ = "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())"
_CAP_SYS_ADMIN = 21


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried: what, whether it works, what was seen, and the way out if not."""

    what: str
    passed: bool
    seen: str
    way_out: str = ""

    def __str__(self) -> str:
        text = f"{self.what}: {self.seen}"
        return text if self.passed or not self.way_out else f"{text} ({self.way_out})"


@dataclass(frozen=True, slots=True)
class LazyProbe:
    """``path`` is the data path to use or None; ``directio``: EROFS takes that mount option."""

    path: str | None
    directio: bool
    checks: tuple[Check, ...]

    @property
    def reasons(self) -> list[str]:
        """Why there is no lazy path, one line for each check that failed; empty if there is one."""
        return [str(check) for check in self.checks if not check.passed]


def probe_lazy(root: Path) -> LazyProbe:
    """Try the lazy data path under the existing directory ``root``; takes well under a second.

    Leaves out what cannot work once something before it failed. Never raises for what a kernel or
    a file system lacks; OSError if ``root`` cannot be written.
    """
    checks = [_check_kernel(os.uname().release), _check_rights()]
    directio = False
    if not checks[1].passed:
        return LazyProbe(None, False, tuple(checks))
    _remove_leftovers(root)
    with _scratch(root) as scratch:
        for attempt in (_check_marks, _check_erofs, _check_events):
            checks.append(attempt(scratch))
            if not checks[-1].passed:
                break
        else:
            directio = _takes_directio(scratch)
    works = all(check.passed for check in checks[1:])
    if works:  # what was seen to work outweighs a version number
        checks = [check for check in checks if check.passed]
    return LazyProbe(FANOTIFY if works else None, directio, tuple(checks))


def probe_directio(root: Path) -> bool:
    """Whether EROFS takes its mount option ``directio`` here; no, if that can't be tried."""
    try:
        _remove_leftovers(root)
        with _scratch(root) as scratch:
            return _takes_directio(scratch)
    except OSError:
        return False


def _check_kernel(release: str) -> Check:
    """Linux 6.14 has pre-content events; a distribution may have them earlier."""
    numbers = [int(part) for part in release.replace("-", ".").split(".")[:2] if part.isdigit()]
    return Check(
        "kernel",
        numbers >= [6, 14],
        f"Linux {release}",
        "fanotify pre-content events came with Linux 6.14: upgrade the kernel",
    )


def _check_rights() -> Check:
    """CAP_SYS_ADMIN among the effective capabilities of this process (capabilities(7))."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    line = next((row for row in status.splitlines() if row.startswith("CapEff:")), "CapEff: 0")
    held = bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
    seen = "CAP_SYS_ADMIN is held" if held else "CAP_SYS_ADMIN is missing"
    return Check("permissions", held, seen, "run the daemon as root on the host")


def _check_marks(scratch: Path) -> Check:
    """A pre-content mark on a private bind mount of a directory of this file system."""
    what = "fanotify pre-content events on the cache's file system"
    kind = next((m.kind for m in _mounts_above(scratch)), "unknown")
    try:
        group = check(lib.ember_guard_group(), "fanotify_init")
    except OSError as error:
        return Check(what, False, _words(error), "the kernel needs fanotify with Linux 6.14's HSM")
    try:
        check(_mark(group, scratch / "guarded"), "fanotify_mark")
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
            way_out = "put the cache on ext4, xfs or btrfs (tmpfs and overlayfs refuse them)"
            return Check(what, False, f"refused by {kind}", way_out)
        return Check(what, False, _words(error))
    finally:
        os.close(group)
    return Check(what, True, f"work on {kind}")


def _check_erofs(scratch: Path) -> Check:
    """An EROFS image in a plain file with 512-byte blocks and an extra device."""
    what = "file-backed EROFS with 512-byte blocks"
    try:
        _try_mount(scratch, directio=False)
    except OSError as error:
        if error.errno == errno.ENODEV:
            return Check(what, False, "no EROFS in this kernel", "modprobe erofs")
        if error.errno == errno.ENOTBLK:
            way_out = "Linux 6.12 with CONFIG_EROFS_FS_BACKED_BY_FILE"
            return Check(what, False, "only block devices can be mounted", way_out)
        return Check(what, False, _words(error), "Linux 6.12 or newer is needed")
    return Check(what, True, "mounts")


def _takes_directio(scratch: Path) -> bool:
    try:
        _try_mount(scratch, directio=True)
    except OSError:
        return False
    return True


def _try_mount(scratch: Path, *, directio: bool) -> None:
    layer = scratch / "layer"
    mounts.mount_erofs(scratch / "metadata", layer, [scratch / "views/v"], directio=directio)
    mounts.unmount(layer, detach=True)


def _check_events(scratch: Path) -> Check:
    """A read of a hole through EROFS waits, and then gives what was written meanwhile."""
    what = "reads of absent bytes wait for them"
    layer = scratch / "layer"
    wanted = os.urandom(_VIEW_BYTES)
    with ExitStack() as stack:
        group = check(lib.ember_guard_group(), "fanotify_init")
        # Runs last, when no process of ours reads any more, or else frees the one that does.
        stack.callback(os.close, group)
        check(_mark(group, scratch / "guarded"), "fanotify_mark")
        try:
            mounts.mount_erofs(scratch / "metadata", layer, [scratch / "guarded/v"])
        except OSError as error:
            return Check(what, False, _words(error))
        stack.callback(mounts.unmount, layer, detach=True)
        reader = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _READ, str(layer / os.fsdecode(FILE_NAME))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(_end, reader)
        events, got = _serve(group, reader, scratch / "views/v", wanted)
    seen = "1 event" if events == 1 else f"{events} events"
    if got != wanted:
        way_out = "this kernel's EROFS does not raise pre-content events"
        return Check(what, False, f"{seen}, and the bytes were wrong", way_out)
    return Check(what, True, f"{seen}, right bytes")


def _serve(
    group: int, reader: subprocess.Popen[bytes], view: Path, content: bytes
) -> tuple[int, bytes]:
    """Fill the view at the first event, answer each, until the reader has ended or time is up."""
    assert reader.stdout is not None
    events, got = 0, b""
    with selectors.DefaultSelector() as selector:
        selector.register(group, selectors.EVENT_READ)
        selector.register(reader.stdout, selectors.EVENT_READ)
        while ready := selector.select(_ANSWER_S):
            for key, _ in ready:
                if key.fileobj is reader.stdout:
                    part = os.read(reader.stdout.fileno(), _VIEW_BYTES)
                    got += part
                    if not part:
                        return events, got
                    continue
                if events == 0:
                    view.write_bytes(content)
                events += _allow_one(group)
    return events, got


def _allow_one(group: int) -> int:
    """Take one event (struct fanotify_event_metadata: the descriptor is at byte 16), allow it."""
    try:
        event = os.read(group, 48)
    except BlockingIOError:
        return 0
    descriptor = int.from_bytes(event[16:20], sys.byteorder, signed=True)
    os.write(group, event[16:20] + (1).to_bytes(4, sys.byteorder))
    os.close(descriptor)
    return 1


def _end(reader: subprocess.Popen[bytes]) -> None:
    reader.kill()
    if reader.stdout is not None:
        reader.stdout.close()
    with suppress(subprocess.TimeoutExpired):
        reader.wait(_ANSWER_S)


def _mark(group: int, path: Path) -> int:
    if not mounts.is_mounted(path):
        return -errno.EINVAL
    return int(lib.ember_guard_mark(group, os.fsencode(path)))


@contextmanager
def _scratch(root: Path) -> Iterator[Path]:
    """A directory with an image, its sparse view, and a private bind mount of the view's place."""
    scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=root))
    try:
        for name in ("views", "guarded", "layer"):
            (scratch / name).mkdir()
        (scratch / "metadata").write_bytes(probe_image(_VIEW_BYTES))
        with open(scratch / "views/v", "wb") as view:
            view.truncate(_VIEW_BYTES)
        mounts.bind_private(scratch / "views", scratch / "guarded")
        yield scratch
    finally:
        _remove(scratch)


def _remove(scratch: Path) -> None:
    for name in ("layer", "guarded"):
        mounts.unmount(scratch / name, detach=True)
    shutil.rmtree(scratch, ignore_errors=True)


def _remove_leftovers(root: Path) -> None:
    """What a probe that was killed has left; what can't go stays, and is in nobody's way."""
    for leftover in root.glob(SCRATCH_PREFIX + "*"):
        with suppress(OSError):
            if stat.S_ISDIR(leftover.lstat().st_mode):
                _remove(leftover)
            else:
                leftover.unlink()


def _mounts_above(path: Path) -> Iterator[mounts.Mount]:
    """The mount that shows ``path``, then those that it is in."""
    found = [m for m in mounts.mountinfo() if path.is_relative_to(m.target)]
    return iter(sorted(found, key=lambda m: len(m.target.parts), reverse=True))


def _words(error: OSError) -> str:
    return error.strerror or str(error)
