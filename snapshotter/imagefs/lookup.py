"""Looks for indexes that others made, in the repository of the image that is being pulled.

A pull waits for a lookup no longer than its budget; what comes later is kept for the next pull.
One lookup of an image at a time, whoever asks; what was not found is not asked for again for a
while, unless other keys are trusted by then. Everything is bounded.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from snapshotter.clock import Clock
from snapshotter.content import Digest
from snapshotter.errors import EmberError, RefusedError, UnavailableError
from snapshotter.imagefs.catalog import Layer
from snapshotter.imagefs.decision import ImageDocument
from snapshotter.imagefs.provenance import Origin, Provenance
from snapshotter.imagefs.trust import REGISTRY, Trust
from snapshotter.indexes.artifact import ARTIFACT_TYPE, IndexedLayer
from snapshotter.indexes.find import Source, likely, load
from snapshotter.indexes.keys import Keyring
from snapshotter.oci.documents import Descriptor
from snapshotter.oci.reference import Reference, parse_reference
from snapshotter.tasks import end_all

log = logging.getLogger(__name__)

LOOKUPS = 16
"""So many of one registry at once, and eight times that in all: one that hangs leaves room for
others."""
REGISTRIES = 8
LAYERS_AT_ONCE = 8
REMEMBERED = 1024
REASONS = 2
"""So many reasons are told of why nothing that lies there is used."""
FAILURE_SHARE = 0.1
"""A registry that failed is asked again sooner than one that said there is nothing."""
LONGEST_S = 300.0
"""A lookup that nobody waits for any more ends then."""


class Fetched(Protocol):
    """Brings an index and puts it on the shelf (arrivals.py)."""

    async def bring(self, layer: Layer, offered: IndexedLayer, provenance: Provenance) -> bool:
        """Whether the layer has an index now that counts; RefusedError if what came is unfit."""
        ...


class Found(StrEnum):
    """How a lookup ended."""

    FOUND = "found"
    PARTLY = "partly"
    ABSENT = "absent"
    REFUSED = "refused"
    FAILED = "failed"
    SLOW = "slow"
    """It has not, within the budget."""
    BUSY = "busy"


@dataclass(frozen=True, slots=True)
class Outcome:
    """``why`` is a sentence for whoever asks why there is no index."""

    found: Found
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Miss:
    outcome: Outcome
    until_s: float
    keys: frozenset[str]


Key = tuple[str, Digest]


class Lookup:
    """Lookups of images by repository and manifest; ``last`` is how each ended."""

    def __init__(
        self,
        source: Source,
        arrivals: Fetched,
        trust: Trust,
        is_refused: Callable[[Digest], str | None],
        clock: Clock,
        *,
        budget_s: float,
        forget_s: float,
        count: Callable[[str], object],
    ) -> None:
        """``is_refused``: why an artifact is never used again; ``count`` is told how each ended."""
        self._source = source
        self._arrivals = arrivals
        self._trust = trust
        self._is_refused = is_refused
        self._clock = clock
        self._budget_s = budget_s
        self._forget_s = forget_s
        self._count = count
        self._running: dict[Key, asyncio.Task[Outcome]] = {}
        self._misses: OrderedDict[Key, _Miss] = OrderedDict()
        self._complained: OrderedDict[tuple[Digest, str], None] = OrderedDict()
        self.last: OrderedDict[Digest, Outcome] = OrderedDict()
        self.counts: Counter[str] = Counter()

    async def look(self, document: ImageDocument, wanted: Sequence[Layer]) -> Outcome:
        """Have indexes for ``wanted`` here, if there are some; returns within the budget."""
        key = (document.repository, document.manifest)
        known = self._remembered(key)
        if known is not None:
            return known
        task = self._running.get(key)
        if task is None:
            if self._is_busy(document.repository):
                return self._ended(key, Outcome(Found.BUSY, "too many lookups are under way"))
            task = asyncio.create_task(self._run(key, wanted), name=f"lookup {key[1]}")
            self._running[key] = task
            task.add_done_callback(lambda _: self._running.pop(key, None))
        done, _ = await asyncio.wait([task], timeout=self._budget_s)
        if not done:
            why = f"its registry had not given one within {self._budget_s:g} s"
            return self._ended(key, Outcome(Found.SLOW, f"{why}; it is kept when it comes"))
        return task.result()

    def _is_busy(self, repository: str) -> bool:
        registry = repository.partition("/")[0]
        same = sum(name.partition("/")[0] == registry for name, _ in self._running)
        return same >= LOOKUPS or len(self._running) >= REGISTRIES * LOOKUPS

    async def close(self) -> None:
        """End what is under way."""
        tasks = list(self._running.values())
        await end_all(tasks)

    def forget(self, manifest: Digest) -> None:
        """Of an image that is removed nothing is remembered."""
        self.last.pop(manifest, None)
        for key in [key for key in self._misses if key[1] == manifest]:
            del self._misses[key]

    def _remembered(self, key: Key) -> Outcome | None:
        miss = self._misses.get(key)
        if miss is None:
            return None
        now = frozenset(self._trust.keys.read().keys)
        if self._clock.monotonic_s() < miss.until_s and now == miss.keys:
            return miss.outcome
        del self._misses[key]
        return None

    def _ended(self, key: Key, outcome: Outcome) -> Outcome:
        self._count(outcome.found.value)
        self.counts[outcome.found.value] += 1
        how = f"{outcome.found.value}: {outcome.why}" if outcome.why else outcome.found.value
        log.info("indexes beside %s@%s: %s", *key, how)
        self.last.pop(key[1], None)
        while len(self.last) >= REMEMBERED:
            self.last.popitem(last=False)
        self.last[key[1]] = outcome
        return outcome

    async def _run(self, key: Key, wanted: Sequence[Layer]) -> Outcome:
        ring = self._trust.keys.read()
        try:
            async with asyncio.timeout(LONGEST_S):
                outcome = await self._search(key, wanted, ring)
        except TimeoutError:
            outcome = Outcome(Found.FAILED, f"no end of it after {LONGEST_S:g} s")
        except EmberError as error:
            outcome = Outcome(Found.FAILED, str(error))
        except Exception as error:
            log.exception("the lookup of indexes for %s failed", key[1])
            outcome = Outcome(Found.FAILED, f"{type(error).__name__}, see the log")
        if outcome.found not in (Found.FOUND, Found.PARTLY):
            while len(self._misses) >= REMEMBERED:
                self._misses.popitem(last=False)
            share = FAILURE_SHARE if outcome.found is Found.FAILED else 1.0
            until_s = self._clock.monotonic_s() + share * self._forget_s
            self._misses[key] = _Miss(outcome, until_s, frozenset(ring.keys))
        return self._ended(key, outcome)

    async def _search(self, key: Key, wanted: Sequence[Layer], ring: Keyring) -> Outcome:
        """The first artifact that is trusted and whole gives what it has; then the next one."""
        repository, image = key
        pinned = parse_reference(repository).with_digest(image)
        entries = await self._source.referrers(pinned, ARTIFACT_TYPE)
        if not entries:
            return Outcome(Found.ABSENT, "no index lies beside it in its repository")
        left = list(dict.fromkeys(wanted))
        faults: list[str] = []
        for entry in likely(entries, ring):
            try:
                left = await self._take(pinned, entry, left, ring, faults)
            except UnavailableError:
                raise
            except EmberError as error:
                self._complain(entry.digest, str(error))
                faults.append(str(error))
            if not left:
                return Outcome(Found.FOUND)
        why = _some(faults) or f"those there are do not cover {len(left)} of its layers"
        if len(left) < len(set(wanted)):
            return Outcome(Found.PARTLY, why)
        return Outcome(Found.REFUSED, why)

    async def _take(
        self,
        image: Reference,
        entry: Descriptor,
        left: Sequence[Layer],
        ring: Keyring,
        faults: list[str],
    ) -> list[Layer]:
        """Those of ``left`` that still lack an index after what this artifact gave."""
        refused = self._is_refused(entry.digest)
        if refused is not None:
            raise RefusedError(f"artifact {entry.digest}: {refused}")
        found = await load(self._source, image, entry.digest, ring, entry.size_bytes)
        if found.key_id is None and self._trust.mode != REGISTRY:
            raise RefusedError(found.refusal)
        origin = Origin.REGISTRY if found.key_id is None else Origin.SIGNED
        provenance = Provenance(
            origin, found.key_id or "", found.digest, repositories=(found.repository,)
        )
        artifact, manifest = found.artifact, found.digest
        turn = asyncio.Semaphore(LAYERS_AT_ONCE)

        async def bring(layer: Layer, offer: IndexedLayer) -> bool:
            async with turn:
                return await self._arrivals.bring(layer, offer, provenance)

        offers = [(layer, artifact.layer(layer.blob)) for layer in left]
        outcomes = await asyncio.gather(
            *(bring(layer, offer) for layer, offer in offers if offer is not None),
            return_exceptions=True,
        )
        results = iter(outcomes)
        missing = [layer for layer, offer in offers if offer is None or next(results) is not True]
        for error in outcomes:
            if isinstance(error, EmberError):
                self._complain(manifest, str(error))
                faults.append(str(error))
            elif isinstance(error, BaseException):
                raise error
        return missing

    def _complain(self, manifest: Digest, why: str) -> None:
        """Once, not at each pull."""
        if (manifest, why) in self._complained:
            return
        while len(self._complained) >= REMEMBERED:
            self._complained.popitem(last=False)
        self._complained[manifest, why] = None
        what = "" if str(manifest) in why else f"index artifact {manifest}: "
        log.warning("an index is not used: %s%s", what, why)


def _some(faults: Sequence[str]) -> str:
    """What an operator is told of many artifacts; the log has had each."""
    left = len(faults) - REASONS
    more = [f"{left} more, see the log"] if left > 0 else []
    return "; ".join([*faults[:REASONS], *more])
