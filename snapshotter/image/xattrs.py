"""Which xattrs of a tar entry reach the layer, and in what form.

Pure. Follows what the kernel does when containerd's unpacker calls lsetxattr on ext4: names of no
known namespace are ignored, values the kernel would refuse make the layer refused, and
``trusted.*`` never passes, or an image could forge overlayfs's own marks.
"""

from __future__ import annotations

from struct import Struct, error

from snapshotter.errors import RefusedError
from snapshotter.image.pax import XATTR_PREFIX
from snapshotter.image.tree import Kind, Xattrs

ACL_ACCESS = b"system.posix_acl_access"
ACL_DEFAULT = b"system.posix_acl_default"
CAPABILITY = b"security.capability"
NAME_BYTES = 255
VALUE_BYTES = 65535

_ACL_ENTRY = Struct("<HHI")
_ACL_BASE_TAGS = frozenset((0x01, 0x04, 0x20))
_ACL_TAGS = frozenset((0x01, 0x02, 0x04, 0x08, 0x10, 0x20))
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
    if not value or value[:4] != b"\x02\0\0\0" or (name == ACL_DEFAULT and kind is not Kind.DIR):
        if not value:
            return False  # removes the ACL
        raise RefusedError(f"xattr {name.decode()} does not belong here or is malformed")
    try:
        tags = [tag for tag, _, _ in _ACL_ENTRY.iter_unpack(value[4:])]
    except error as malformed:
        raise RefusedError(f"xattr {name.decode()} is malformed") from malformed
    if not _ACL_TAGS.issuperset(tags) or (tags and not _ACL_BASE_TAGS.issubset(tags)):
        raise RefusedError(f"xattr {name.decode()} lacks an entry or has an unknown one")
    return bool(tags) and (name == ACL_DEFAULT or len(tags) > len(_ACL_BASE_TAGS))
