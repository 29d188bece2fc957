"""The reusable check: what a directory shows, row by row, against what it should show.

``walk`` reads a mounted tree with all its metadata and content; ``compare`` gives the differences
as text, empty if there are none. Rows are also what written truths hold (``load_truth``), so an
expected tree may come from a file, from another mount, or from a test's own table.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

_TYPES = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFLNK: "symlink",
}
_READ_BYTES = 1 << 20


@dataclass(slots=True)
class Row:
    """One path. None in an expected row means "anything"; a walked row has every field set.

    ``type`` is file, dir, char, block, fifo, socket, symlink, or ghost: a name that is listed
    and can't be looked up. ``hardlink_of`` is the first path (in byte order) of the same inode,
    "" for that path itself.
    """

    type: str
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    mtime_ns: int | None = None
    size: int | None = None
    sha256: str | None = None
    link: str | None = None
    rdev: tuple[int, int] | None = None
    xattrs: dict[str, bytes] | None = field(default=None)
    hardlink_of: str | None = None


Rows = dict[str, Row]
Departure = Callable[[str, str, Row, Row], bool]
"""(path, field, expected, actual) -> whether a difference there is a known and accepted one."""


def walk(root: str | os.PathLike[str], *, content: bool = True) -> Rows:
    """Every path below ``root`` (not the root itself), relative, names as os.fsdecode gives them.

    Files are read wholly unless ``content`` is false.
    """
    top = os.fspath(root)
    rows: Rows = {}
    first_path: dict[tuple[int, int], str] = {}
    for path in sorted(_paths(top), key=os.fsencode):
        full = os.path.join(top, path)
        try:
            status = os.lstat(full)
        except OSError:
            rows[path] = Row("ghost")
            continue
        row = rows[path] = _row(full, status, content=content)
        row.hardlink_of = ""
        if row.type != "dir" and status.st_nlink > 1:
            first = first_path.setdefault((status.st_dev, status.st_ino), path)
            row.hardlink_of = "" if first == path else first
    return rows


def _paths(top: str) -> Iterator[str]:
    stack = [""]
    while stack:
        here = stack.pop()
        with os.scandir(os.path.join(top, here)) as entries:
            for entry in entries:
                path = os.path.join(here, entry.name)
                yield path
                try:
                    status = os.lstat(os.path.join(top, path))
                except OSError:
                    continue  # a ghost
                if stat.S_ISDIR(status.st_mode):
                    stack.append(path)


def _row(full: str, status: os.stat_result, *, content: bool) -> Row:
    row = Row(
        _TYPES[stat.S_IFMT(status.st_mode)],
        stat.S_IMODE(status.st_mode),
        status.st_uid,
        status.st_gid,
        status.st_mtime_ns,
    )
    row.xattrs = {
        name: os.getxattr(full, name, follow_symlinks=False)
        for name in os.listxattr(full, follow_symlinks=False)
    }
    row.size = status.st_size
    row.rdev = (os.major(status.st_rdev), os.minor(status.st_rdev))
    row.link = ""
    if row.type == "symlink":
        row.link = os.readlink(full)  # noqa: PTH115 (a Path would tidy the target)
    if row.type == "file" and content:
        row.sha256 = _sha256(full)
    return row


def _sha256(full: str) -> str:
    digest = hashlib.sha256()
    with open(full, "rb", buffering=0) as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def load_truth(path: Path) -> Rows:
    """The rows of a JSON truth; a field it leaves out of a row may be anything.

    But for these, which then must be plain: no xattrs, no device, no second name.
    """
    rows: Rows = {}
    for name, given in json.loads(path.read_text()).items():
        row = rows[name] = _truth_row(given)
        if row.type == "ghost":
            continue
        row.xattrs = row.xattrs or {}
        if row.hardlink_of is None:
            row.hardlink_of = ""
    return rows


def _truth_row(given: Mapping[str, Any]) -> Row:
    known = {item.name for item in fields(Row)}
    values = {key: value for key, value in given.items() if key in known}
    if "rdev" in values:
        values["rdev"] = tuple(values["rdev"])
    if "xattrs" in values:
        values["xattrs"] = {k: base64.b64decode(v) for k, v in values["xattrs"].items()}
    return Row(**values)


def compare(
    expected: Mapping[str, Row],
    actual: Mapping[str, Row],
    departures: tuple[Departure, ...] = (),
    *,
    ignore_unlisted_directories: bool = False,
) -> list[str]:
    """What differs, one line each; empty if nothing does.

    ``ignore_unlisted_directories``: a directory that the truth has no row for is no difference
    if rows below it are expected.
    """
    lines = [f"{path!r}: not there" for path in expected if path not in actual]
    parents = _parents(expected) if ignore_unlisted_directories else frozenset()
    expected, actual = _canonical(expected), _canonical(actual)
    for path, row in actual.items():
        if path not in expected:
            if not (row.type == "dir" and path in parents):
                lines.append(f"{path!r}: {row.type} that nobody expected")
            continue
        wanted = expected[path]
        for item in fields(Row):
            want, have = getattr(wanted, item.name), getattr(row, item.name)
            if want is None or want == have:
                continue
            if not any(accepted(path, item.name, wanted, row) for accepted in departures):
                lines.append(f"{path!r}: {item.name} is {have!r}, expected {want!r}")
    return lines


def _canonical(rows: Mapping[str, Row]) -> Rows:
    """The rows with each hard-link group named by its first path in byte order."""
    groups: dict[str, list[str]] = {}
    for path, row in rows.items():
        groups.setdefault(row.hardlink_of or path, []).append(path)
    result: Rows = {}
    for members in groups.values():
        first = min(members, key=os.fsencode)
        for path in members:
            row = rows[path]
            if row.hardlink_of is not None:
                row = replace(row, hardlink_of="" if path == first else first)
            result[path] = row
    return result


def _parents(rows: Mapping[str, Row]) -> frozenset[str]:
    found: set[str] = set()
    for path in rows:
        while path := path.rpartition("/")[0]:
            found.add(path)
    return frozenset(found)


def directory_sizes(path: str, name: str, wanted: Row, have: Row) -> bool:
    """How long a directory's own data are is the file system's affair."""
    return name == "size" and wanted.type == have.type == "dir"


def clamped_times(path: str, name: str, wanted: Row, have: Row) -> bool:
    """containerd sets times before 1970 (and behind 2262) to 1970."""
    if name != "mtime_ns" or wanted.mtime_ns is None:
        return False
    return have.mtime_ns == 0 and not 0 <= wanted.mtime_ns < 1 << 63


def directory_times(path: str, name: str, wanted: Row, have: Row) -> bool:
    """containerd leaves implied parents with the time of the unpacking."""
    return name == "mtime_ns" and wanted.type == have.type == "dir"


CONTAINERD_DEPARTURES: tuple[Departure, ...] = (directory_sizes, clamped_times, directory_times)
"""Where containerd's own overlayfs departs from the tar: the tar is right, and these differ."""
