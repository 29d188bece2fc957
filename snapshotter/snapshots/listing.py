"""List without a lock: pages of rows read one by one, by an index where the filters allow it.

containerd looks a layer up by label and parent after every "already exists", so that must not mean
to read every row of a node with ten thousand.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Sequence
from functools import partial

from snapshotter.snapshots import records as rows
from snapshotter.snapshots.database import Database
from snapshotter.snapshots.filters import Filter, Selector, label_of, parse
from snapshotter.snapshots.model import Info
from snapshotter.snapshots.records import Record

_PAGE = 400


async def blocks(database: Database, texts: Sequence[str], size: int) -> AsyncIterator[list[Info]]:
    """Matching snapshots in blocks of ``size``; one that comes or goes meanwhile may be missed."""
    chosen = parse(texts)
    block: list[Info] = []
    async for records in _pages(database, chosen):
        for record in records:
            if not chosen.matches(record.info):
                continue
            block.append(record.info)
            if len(block) == size:
                yield block
                block = []
    if block:
        yield block


async def _pages(database: Database, chosen: Filter) -> AsyncIterator[list[Record]]:
    found = await database.read(lambda c: _by_index(c, chosen))
    if found is not None:
        yield found
        return
    last = 0
    while records := await database.read(partial(rows.page, after_id=last, limit=_PAGE)):
        yield records
        last = records[-1].id


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
    records = (rows.by_id(connection, ident) for ident in sorted(ids))
    return [record for record in records if record is not None]


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
