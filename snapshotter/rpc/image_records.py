"""containerd's image records: which of them a user means by an image, and which others hold it.

A name is a record in one namespace. What CRI pulls has three: the name, the name with its digest,
and the id of its configuration; the last two are CRI's own and go with the last name. Content
stays as long as any record in any namespace refers to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from snapshotter.errors import NotFoundError


@dataclass(frozen=True, slots=True)
class Record:
    """``target`` is the digest of the manifest or index; ``by_cri``: CRI made it."""

    namespace: str
    name: str
    target: str
    by_cri: bool = False

    @property
    def derived(self) -> bool:
        """Whether CRI made this record beside the name that was pulled."""
        return self.by_cri and (self.name.startswith("sha256:") or "@" in self.name)

    def __str__(self) -> str:
        return f"{self.name} in namespace {self.namespace}"


class Store(Protocol):
    """containerd, as far as its image records go."""

    async def namespaces(self) -> list[str]: ...

    async def image_records(self, namespace: str) -> list[Record]: ...

    async def delete_image(self, namespace: str, name: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Choice:
    """The records to remove, and those that hold the same content after that."""

    gone: tuple[Record, ...]
    left: tuple[Record, ...]


def choose(records: Iterable[Record], names: Collection[str], namespace: str, said: str) -> Choice:
    """What removing ``names`` from ``namespace`` means; ``said`` is what the user called it.

    NotFoundError if only other namespaces have them. No record at all is fine: the image was
    removed from containerd before, and what is left of it is Ember's.
    """
    records = list(records)
    mine = [r for r in records if r.namespace == namespace and r.name in names]
    others = sorted({r.namespace for r in records if r.name in names} - {namespace})
    if others and not mine:
        raise NotFoundError(
            f"image {said} is not in containerd's namespace {namespace} but in"
            f" {', '.join(others)}; say which with --namespace"
        )
    targets = {r.target for r in mine}
    same = [r for r in records if r not in mine and (r.target in targets or r.name in names)]
    here = [r for r in same if r.namespace == namespace]
    if all(r.derived for r in here):
        mine += here
        same = [r for r in same if r.namespace != namespace]
    return Choice(tuple(mine), tuple(same))


async def every_record(store: Store) -> list[Record]:
    """The image records of all namespaces."""
    found: list[Record] = []
    for namespace in await store.namespaces():
        found += await store.image_records(namespace)
    return found


async def every_name(store: Store) -> set[str]:
    """The names of all images, in any namespace."""
    return {record.name for record in await every_record(store)}


async def delete(store: Store, records: Iterable[Record]) -> None:
    """Remove them, those that CRI made beside others last; what is gone already is fine."""
    for record in sorted(records, key=lambda record: record.derived):
        with contextlib.suppress(NotFoundError):
            await store.delete_image(record.namespace, record.name)
