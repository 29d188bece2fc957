"""Names of tar entries: cleaned, split, and kept inside the layer's root.

Pure. A name is cleaned as text before any link is looked at (``a/../b`` is ``b``), as
containerd's unpacker does; one that climbs above the root is refused.
"""

from __future__ import annotations

from snapshotter.errors import RefusedError

NAME_BYTES = 255
PATH_BYTES = 4095
WHITEOUT_PREFIX = b".wh."
OPAQUE_MARK = b".wh..wh..opq"


def shown(name: bytes) -> str:
    """A name for messages: printable, and not too long."""
    printable = name.decode(errors="backslashreplace")
    return repr(printable if len(printable) <= 160 else printable[:157] + "…")


def clean(name: bytes, what: str = "entry") -> bytes:
    """The name without ``.``, ``..``, doubled, leading and trailing slashes; b"" is the root.

    RefusedError names the one that leaves the root, is too long, or has a NUL.
    """
    if name[:2] == b"./":
        name = name[2:]
    if name[-1:] == b"/":
        name = name[:-1]
    if not (b"//" in name or name[:1] in (b"/", b".") or b"/." in name or name[-1:] == b"/"):
        if len(name) > PATH_BYTES or b"\0" in name:
            raise RefusedError(f"{what} {shown(name)}: a path of {len(name)} bytes or with a NUL")
        return name
    parts: list[bytes] = []
    for part in name.split(b"/"):
        if part == b"..":
            if not parts:
                raise RefusedError(f"{what} {shown(name)}: the name leaves the layer's root")
            parts.pop()
        elif part not in (b"", b"."):
            parts.append(part)
    cleaned = b"/".join(parts)
    if len(cleaned) > PATH_BYTES or b"\0" in cleaned:
        raise RefusedError(f"{what} {shown(name)}: a path of {len(cleaned)} bytes or with a NUL")
    return cleaned


def hidden_name(base: bytes) -> bytes:
    """The name that the whiteout ``base`` (it starts with ``.wh.``) hides.

    RefusedError if that is no name (``.wh.``, ``.wh..``, ``.wh...``).
    """
    hidden = base[len(WHITEOUT_PREFIX) :]
    if hidden in (b"", b".", b".."):
        raise RefusedError(f"invalid whiteout name {shown(base)}")
    return hidden
