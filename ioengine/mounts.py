"""Mounts by mount(2): private bind mounts, EROFS over plain files, and what is mounted where.

The only module that mounts or unmounts. Paths are bytes to the kernel; mount(8) is not used, as it
would put a loop device under an image file. It must not know what the mounts are for.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import signal
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MS_RDONLY = 1
MS_BIND = 0x1000
MS_PRIVATE = 0x40000
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8
_OPTIONS_BYTES = 4095  # the kernel copies one page of options
_F_SETSIG, _F_SETLEASE = 10, 1024
_AT_QUIETLY = 0x100 | 0x800 | 0x4000  # no symbolic link, no automount, ask no server
_STATX_MNT_ID_UNIQUE, _STATX_ATTR_MOUNT_ROOT = 0x4000, 0x2000
_STATX_BYTES, _STATX_HEAD, _MNT_ID_AT = 256, struct.Struct("=I4xQ"), 144  # struct statx
_ESCAPE = re.compile(rb"\\([0-7]{3})")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
)
_libc.statx.argtypes = (
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.c_uint,
    ctypes.c_char_p,
)
_libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo (proc(5)); ``root`` is what of the file system is shown."""

    mount_id: int
    parent_id: int
    device: tuple[int, int]
    root: Path
    target: Path
    options: tuple[str, ...]
    kind: str
    source: str
    super_options: tuple[str, ...]


def _mount(source: bytes | None, target: Path, kind: str | None, flags: int, data: bytes) -> None:
    result = _libc.mount(
        source, os.fsencode(target), kind.encode() if kind else None, flags, data or None
    )
    if result < 0:
        number = ctypes.get_errno()
        what = os.fsdecode(source or b"")
        raise OSError(number, f"cannot mount {what}: {os.strerror(number)}", str(target))


def bind_private(source: Path, target: Path) -> None:
    """Show the directory ``source`` at ``target`` too, as a mount of its own that is not shared.

    Raises OSError. On a failure nothing stays mounted.
    """
    _mount(os.fsencode(source), target, None, MS_BIND, b"")
    try:
        _mount(None, target, None, MS_PRIVATE, b"")
    except OSError:
        unmount(target, detach=True)
        raise


def mount_erofs(
    metadata: Path, target: Path, devices: Sequence[Path] = (), *, directio: bool = False
) -> None:
    """Mount the EROFS image ``metadata`` read-only, its extra devices in the order of its slots.

    All of them are plain files, opened by the kernel through the paths given here: through which
    mount a device is opened decides whether its reads raise events. ``directio`` (newer than
    file-backed mounts: probe it) keeps the devices' bytes out of the page cache of their own file
    system. Raises OSError: ENOTBLK where the kernel has no file-backed EROFS, EINVAL for an
    image or option that it does not know, or for a path that does not fit into mount options.
    """
    options = ["ro"]
    for device in devices:
        if "," in str(device):
            raise OSError(errno.EINVAL, "a comma cannot be part of a mount option", str(device))
        options.append(f"device={device}")
    if directio:
        options.append("directio")
    data = os.fsencode(",".join(options))
    if len(data) > _OPTIONS_BYTES:
        raise OSError(errno.ENAMETOOLONG, f"mount options of {len(data)} bytes", str(target))
    _mount(os.fsencode(metadata), target, "erofs", MS_RDONLY, data)


def unmount(target: Path, *, detach: bool = False) -> bool:
    """Unmount what is mounted at ``target``; False if nothing was.

    ``detach`` takes it out of the tree at once and ends it when its last user is gone; without,
    OSError (EBUSY) while it is in use.
    """
    flags = UMOUNT_NOFOLLOW | (MNT_DETACH if detach else 0)
    if _libc.umount2(os.fsencode(target), flags) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOENT):
        return False
    raise OSError(number, f"cannot unmount: {os.strerror(number)}", str(target))


def is_mount_point(directory: Path) -> bool:
    """Whether another file system begins at ``directory``; quick, and blind to bind mounts."""
    try:
        return directory.stat().st_dev != directory.parent.stat().st_dev
    except OSError:
        return False


def mountinfo() -> list[Mount]:
    """All mounts that this process sees, in the kernel's order (what covers comes later)."""
    return parse_mountinfo(Path("/proc/self/mountinfo").read_bytes())


def parse_mountinfo(text: bytes) -> list[Mount]:
    """The mounts in the text of a mountinfo file; ValueError for what is none."""
    mounts = []
    for line in text.splitlines():
        before, divider, after = line.partition(b" - ")
        fields, tail = before.split(b" "), after.split(b" ")
        if not divider or len(fields) < 6 or len(tail) < 3:
            raise ValueError(f"not a line of mountinfo: {line[:200]!r}")
        major, minor = fields[2].split(b":")
        mounts.append(
            Mount(
                mount_id=int(fields[0]),
                parent_id=int(fields[1]),
                device=(int(major), int(minor)),
                root=Path(_plain(fields[3])),
                target=Path(_plain(fields[4])),
                options=tuple(_plain(fields[5]).split(",")),
                kind=_plain(tail[0]),
                source=_plain(tail[1]),
                super_options=tuple(_plain(tail[2]).split(",")),
            )
        )
    return mounts


def _plain(field: bytes) -> str:
    """Undo the kernel's octal escapes (blank, tab, newline, backslash, hash)."""
    return os.fsdecode(_ESCAPE.sub(lambda match: bytes([int(match[1], 8) & 0xFF]), field))


def mount_at(target: Path) -> Mount | None:
    """The uppermost mount whose root is shown exactly at ``target``.

    Symbolic links on the way are followed (the kernel lists real paths); the last name is not
    looked at, so a mount that no longer answers is found too.
    """
    wanted = target.parent.resolve() / target.name
    return next((mount for mount in reversed(mountinfo()) if mount.target == wanted), None)


def is_mounted(target: Path) -> bool:
    """Is something mounted exactly at ``target``?"""
    return mount_at(target) is not None


def unique_id(target: Path) -> int | None:
    """The number of the mount shown at ``target``, which no other ever gets; None if none is there.

    STATX_MNT_ID_UNIQUE (Linux 6.8): the numbers of mountinfo are given again. OSError on an older
    kernel.
    """
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if _libc.statx(-1, os.fsencode(target), _AT_QUIETLY, _STATX_MNT_ID_UNIQUE, buffer) < 0:
        if (number := ctypes.get_errno()) in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise OSError(number, f"statx: {os.strerror(number)}", str(target))
    mask, attributes = _STATX_HEAD.unpack_from(buffer)
    if not mask & _STATX_MNT_ID_UNIQUE:
        raise OSError(errno.ENOSYS, "the kernel numbers no mounts", str(target))
    if not attributes & _STATX_ATTR_MOUNT_ROOT:
        return None
    return int.from_bytes(buffer.raw[_MNT_ID_AT : _MNT_ID_AT + 8], sys.byteorder)


def view_is_open(path: Path) -> bool:
    """Does anybody, an EROFS instance above all, hold the plain file ``path`` open?

    A write lease is granted only for a file that is open nowhere else (fcntl(2), F_SETLEASE);
    mounted instances count, also those that are detached and still read. Descriptors of the
    caller count as well: close them first. The path must be the unmarked one. Raises OSError.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        # Somebody who opens the file at this very moment makes the kernel signal the holder of
        # the lease; SIGIO would end the process, SIGURG is ignored.
        fcntl.fcntl(descriptor, _F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, _F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return True
    else:
        fcntl.fcntl(descriptor, _F_SETLEASE, fcntl.F_UNLCK)
        return False
    finally:
        os.close(descriptor)
