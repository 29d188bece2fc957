"""Mounts that stay the same until their snapshot is committed or removed, kept in memory.

Whoever changes a row drops what is kept of it once the change is durable, and answers only then;
so what is kept was true at some moment of the call that it answers.
"""

from __future__ import annotations

from snapshotter.snapshots.model import Mount

MOST = 4096


class Settled:
    """Event loop only. Keys of snapshots that stand on no lazy layer, with their mounts."""

    def __init__(self) -> None:
        self._mounts: dict[str, tuple[Mount, ...]] = {}
        self.drops = 0
        """Grows with each drop: what was found out before it may be true no longer."""

    def get(self, key: str) -> tuple[Mount, ...] | None:
        return self._mounts.get(key)

    def keep(self, key: str, mounts: tuple[Mount, ...], drops: int) -> None:
        """Keep what was found out when ``drops`` were counted, unless there was one since."""
        if drops != self.drops:
            return
        if len(self._mounts) >= MOST:
            self._mounts.clear()
        self._mounts[key] = mounts

    def drop(self, key: str) -> None:
        """The snapshot is committed or gone."""
        self.drops += 1
        self._mounts.pop(key, None)
