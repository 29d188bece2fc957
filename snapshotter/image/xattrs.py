"""Which xattrs of a tar entry reach the layer, and in what form.

Pure. Follows what the kernel does when containerd's unpacker calls lsetxattr on ext4: names of no
known namespace are ignored, values the kernel would refuse make the layer refused, and
``trusted.*`` never passes, or an image could forge overlayfs's own marks.
"""

from __future__ import annotations

import re
from struct import Struct

from snapshotter.errors import RefusedError
from snapshotter.image.pax import XATTR_PREFIX
from snapshotter.image.tree import Kind, Xattrs

ACL_ACCESS = b"system.posix_acl_access"
ACL_DEFAULT = b"system.posix_acl_default"
CAPABILITY = b"security.capability"
NAME_BYTES = 255
VALUE_BYTES = 65535

_ACL_ENTRY = Struct("<HHI")
_ACL_VERSION = b"\x02\0\0\0"
_OWNER, _GROUP, _MASK, _OTHERS = 0x01, 0x04, 0x10, 0x20
_ACL_TAGS = {_OWNER: "u", 0x02: "U", _GROUP: "g", 0x08: "G", _MASK: "m", _OTHERS: "o"}
_ACL_ORDER = re.compile("ugo|uU*gG*mo")
"""The kernel's order; named users and groups need a mask."""
_ACL_BASE_ENTRIES = 3
_CAPABILITY_BYTES = {0x01000000: 12, 0x02000000: 20, 0x03000000: 24}


def entry_xattrs(records: dict[bytes, bytes], kind: Kind) -> Xattrs | None:
    """The xattrs that an entry of ``kind`` with these pax records gets; None if it has none.

    RefusedError names one that no file can have.
    """
    kept: Xattrs = {}
    for key, value in records.items():
        if key.startswith(XATTR_PREFIX):
            name = key[len(XATTR_PREFIX) :]
            if passes(name, value, kind):
                kept[name] = value
    return kept or None


def passes(name: bytes, value: bytes, kind: Kind) -> bool:
    """Whether an inode of ``kind`` may carry it; RefusedError if no file can."""
    namespace, dot, rest = name.partition(b".")
    if namespace == b"trusted" and dot:
        return False
    if not name or len(name) > NAME_BYTES or len(value) > VALUE_BYTES:
        raise RefusedError(
            f"xattr {name[:60]!r} of {len(value)} bytes: a name has 1 to {NAME_BYTES} bytes,"
            f" a value at most {VALUE_BYTES}"
        )
    if name in (ACL_ACCESS, ACL_DEFAULT):
        return kind is not Kind.SYMLINK and _acl_says_something(name, value, kind)
    if namespace not in (b"user", b"security"):
        return False
    if not rest:
        raise RefusedError(f"xattr {name!r} has a namespace and no name")
    if namespace == b"user":
        return kind in (Kind.FILE, Kind.DIR)
    if name == CAPABILITY:
        _check_capability(value)
    return True


def _check_capability(value: bytes) -> None:
    """As the kernel's validheader: revision, and the length that belongs to it."""
    revision = int.from_bytes(value[:4], "little") & 0xFF000000 if len(value) >= 4 else 0
    if _CAPABILITY_BYTES.get(revision) != len(value):
        raise RefusedError(f"xattr security.capability is malformed: {value[:24].hex()!r}")


def _acl_says_something(name: bytes, value: bytes, kind: Kind) -> bool:
    """Whether the ACL is more than the mode bits; RefusedError if the kernel would not take it."""
    if not value:
        return False  # setting it empty removes it
    if name == ACL_DEFAULT and kind is not Kind.DIR:
        raise RefusedError(f"xattr {name.decode()} on what is no directory")
    tags = "".join(_ACL_TAGS.get(tag, "?") for tag, _, _ in _acl_entries(name, value))
    if _ACL_ORDER.fullmatch(tags) is None:
        raise RefusedError(f"xattr {name.decode()} lacks an entry or has them out of order")
    return name == ACL_DEFAULT or len(tags) > _ACL_BASE_ENTRIES


def _acl_entries(name: bytes, value: bytes) -> list[tuple[int, int, int]]:
    """(tag, permissions, id) of each entry, as linux/posix_acl_xattr.h has them."""
    if value[:4] != _ACL_VERSION or len(value) % _ACL_ENTRY.size != len(_ACL_VERSION):
        raise RefusedError(f"xattr {name.decode()} is malformed")
    entries = list(_ACL_ENTRY.iter_unpack(value[len(_ACL_VERSION) :]))
    if any(permissions > 0o7 for _, permissions, _ in entries):
        raise RefusedError(f"xattr {name.decode()} grants what does not exist")
    return entries


def fit_acl(xattrs: Xattrs, mode: int) -> None:
    """Make an access ACL agree with the mode, which chmod(2) does after the ACL was set.

    Owner, others and (without a mask) the group come from the mode; a mask is the mode's group.
    """
    value = xattrs.get(ACL_ACCESS)
    if value is None:
        return
    entries = _acl_entries(ACL_ACCESS, value)
    group_tag = _MASK if any(tag == _MASK for tag, _, _ in entries) else _GROUP
    bits = {_OWNER: mode >> 6 & 7, group_tag: mode >> 3 & 7, _OTHERS: mode & 7}
    packed = (_ACL_ENTRY.pack(tag, bits.get(tag, old), who) for tag, old, who in entries)
    xattrs[ACL_ACCESS] = _ACL_VERSION + b"".join(packed)
