"""A name stands for a whole file, the old one or the new one, whatever goes wrong in between."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ioengine.directories import write_whole


@pytest.mark.parametrize("synced", [True, False])
def test_a_file_is_made_and_replaced_whole(tmp_path: Path, synced: bool) -> None:
    path = tmp_path / "file.json"
    for data in (b"first", memoryview(b"second one")):
        write_whole(path, data, synced=synced)
        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old", synced=True)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"new", synced=True)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
