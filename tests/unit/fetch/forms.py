"""A layer's plain bytes, and every form of blob that they come in."""

from __future__ import annotations

from collections.abc import Callable

from tests.unit.image.layers import frame, frames, member, members, text

PLAIN = text(400_123)


FORMS: dict[str, Callable[[bytes], bytes]] = {
    "plain": lambda plain: plain,
    "gzip": lambda plain: member(plain, memory_level=1),
    "gzip members": lambda plain: members(plain, 30_000),
    "zstd frame": frame,
    "zstd frames": lambda plain: frames(plain, 30_000),
}
