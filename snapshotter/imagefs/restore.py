"""After a restart: what an earlier daemon left mounted is known and guarded before any answer.

If the guard outlived that daemon nothing was missed. If it did not, holes may have been read as
zeros in between: every incomplete layer that was mounted is named, once, and never used again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from snapshotter.content import Digest
from snapshotter.errors import EmberError, NotFoundError
from snapshotter.imagefs.datapath import DataPath
from snapshotter.imagefs.layer_mounts import LayerMounts
from snapshotter.imagefs.mounted import Mounted
from snapshotter.imagefs.shelf import Shelf
from snapshotter.imagefs.views import Views

log = logging.getLogger(__name__)


async def restore(
    links: Iterable[Path],
    data_path: DataPath,
    mounts: LayerMounts,
    views: Views,
    shelf: Shelf,
    names: Callable[[Digest], Sequence[str]],
) -> None:
    """Take over the mounts that are there; ``links`` are the snapshots' links to them.

    ``names``: the images that a layer's blob is in, for messages.
    """
    found = [mounted for mounted in mounts.restore(links) if mounted.guarded]
    if data_path.guard is None or not data_path.guard.adopted:
        await _suspect(found, mounts, views, names)
    if data_path.guard is None:
        return
    for mounted in found:
        try:
            index = shelf.get(mounted.layer)
            if index is None:
                raise NotFoundError("its index is gone")
            await views.guard(index)
        except EmberError as error:  # a reader that comes to it has it looked up again
            log.error("layer %s is mounted, but %s", mounted.layer, error)


async def _suspect(
    found: Sequence[Mounted],
    mounts: LayerMounts,
    views: Views,
    names: Callable[[Digest], Sequence[str]],
) -> None:
    doubtful = [m for m in found if not m.suspect and not await views.whole(m.view)]
    if not doubtful:
        return
    mounts.mark_suspect(doubtful)
    seen = await mounts.doubted()
    for layer in dict.fromkeys(mounted.layer for mounted in doubtful):
        users = ", ".join(seen.get(layer, ()))
        log.critical(
            "layer %s (%s) was mounted while no guard was there: what its readers saw may have been"
            " zeros. Its next container gets a new mount; %s",
            layer,
            ", ".join(names(layer)) or "of no image that is known",
            f"restart those that run on it: {users}" if users else "none runs on it now",
        )
