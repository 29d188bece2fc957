"""The text of mountinfo becomes mounts; the forms are those of proc(5)."""

from __future__ import annotations

from pathlib import Path

import pytest

from ioengine.mounts import parse_mountinfo


def test_a_line_has_its_fields_with_any_number_of_optional_ones() -> None:
    text = (
        b"36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 shared:7 - ext3 /dev/root rw,errors=go\n"
        b"37 35 0:41 / /run/layer ro - erofs /var/lib/a.erofs ro\n"
    )
    first, second = parse_mountinfo(text)
    assert (first.mount_id, first.parent_id, first.device) == (36, 35, (98, 0))
    assert (first.root, first.target) == (Path("/mnt1"), Path("/mnt2"))
    assert first.options == ("rw", "noatime")
    assert (first.kind, first.source) == ("ext3", "/dev/root")
    assert first.super_options == ("rw", "errors=go")
    assert (second.kind, second.target) == ("erofs", Path("/run/layer"))


def test_escaped_and_odd_bytes_in_paths_come_back() -> None:
    text = b"1 2 0:1 / /a\\040b\\134c\\012d\\377\xfe rw - tmpfs none rw\n"
    (mount,) = parse_mountinfo(text)
    assert bytes(mount.target) == b"/a b\\c\nd\xff\xfe"


def test_an_empty_source_is_kept_empty() -> None:
    (mount,) = parse_mountinfo(b"1 2 0:1 / /a rw - tmpfs  rw\n")
    assert mount.source == "" and mount.super_options == ("rw",)


@pytest.mark.parametrize("text", [b"nonsense\n", b"1 2 0:1 / /a rw tmpfs none rw\n", b" - a b c\n"])
def test_what_is_no_mountinfo_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_mountinfo(text)
