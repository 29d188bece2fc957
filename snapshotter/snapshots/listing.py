"""List without a lock: rows read page by page, by an index where the filters allow it.

containerd looks a layer up by label and parent after every "already exists", so that must not mean
to read every row of a node with ten thousand. Its garbage collection lists them all and lets no
other call through meanwhile, so what was read once is kept for as long as the row is unchanged.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Sequence
from functools import partial

from snapshotter.snapshots import records as rows
from snapshotter.snapshots.database import Database
from snapshotter.snapshots.filters import Filter, Selector, label_of, parse
from snapshotter.snapshots.model import Info
from snapshotter.snapshots.records import Record, Version

_PAGE = 400
_MOST_KEPT = 16_384


class Listing:
    """The snapshots of one database. Unchanged ones come out as the very same Info objects."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._kept: dict[int, tuple[Version, Info]] = {}

    async def blocks(self, texts: Sequence[str], size: int) -> AsyncIterator[list[Info]]:
        """Matching snapshots in blocks of ``size``; one that comes or goes meanwhile may be
        missed."""
        chosen = parse(texts)
        block: list[Info] = []
        async for infos in self._pages(chosen):
            for info in infos:
                if not chosen.matches(info):
                    continue
                block.append(info)
                if len(block) == size:
                    yield block
                    block = []
        if block:
            yield block

    async def _pages(self, chosen: Filter) -> AsyncIterator[list[Info]]:
        found = await self._db.read(lambda c: _by_index(c, chosen))
        if found is not None:
            yield [record.info for record in found]
            return
        last = 0
        while versions := await self._db.read(partial(rows.versions, after_id=last, limit=_PAGE)):
            yield await self._infos(versions)
            last = versions[-1].id

    async def _infos(self, versions: list[Version]) -> list[Info]:
        """Those kept, and the others read; a row that changed in between comes as it is now."""
        kept = self._kept
        changed = [one.id for one in versions if kept.get(one.id, (None,))[0] != one]
        fresh: dict[int, Record] = {}
        if changed:
            records = await self._db.read(partial(rows.among, ids=changed))
            fresh = {record.id: record for record in records}
            if len(kept) + len(fresh) > _MOST_KEPT:
                kept.clear()
            kept.update((one.id, (one.version, one.info)) for one in records)
        infos = []
        for one in versions:
            if one.id in fresh:
                infos.append(fresh[one.id].info)
            elif (entry := kept.get(one.id)) and entry[0] == one:
                infos.append(entry[1])
        return infos


def _by_index(connection: sqlite3.Connection, chosen: Filter) -> list[Record] | None:
    """The few rows that can match, if each alternative pins a name, a label or a parent."""
    if not chosen.alternatives:
        return None
    ids: set[int] = set()
    for alternative in chosen.alternatives:
        pinned = [found for one in alternative if (found := _pinned(connection, one)) is not None]
        if not pinned:
            return None
        fewest: list[int] = min(pinned, key=len)
        ids.update(fewest)
        if len(ids) > _PAGE:
            return None
    return rows.among(connection, sorted(ids))


def _pinned(connection: sqlite3.Connection, selector: Selector) -> list[int] | None:
    if selector.operator != "==" or not selector.value:
        return None
    label = label_of(selector.path)
    if label is not None:
        return rows.ids_by_label(connection, label, selector.value)
    match selector.path:
        case ("name", *_):
            return rows.ids_by_name(connection, selector.value)
        case ("parent", *_):
            return rows.ids_by_parent(connection, selector.value)
    return None
