"""The indexes of this node: opened on first use, a bounded number kept open.

An index is looked up by its layer's blob digest, and beside it lies where it came from: whether it
counts is for others to say (trust.py). The shelf also answers the road's question where a view's
chunks can be made from: every indexed blob that unpacks to it, with every origin known.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ioengine.directories import sync_directory
from snapshotter.content import BlobRef, Digest
from snapshotter.errors import EmberError, NotFoundError, RefusedError, UnavailableError
from snapshotter.fetch import LayerSource
from snapshotter.image.index import LayerIndex
from snapshotter.imagefs.provenance import (
    BUILT_HERE,
    PROVENANCE_SUFFIX,
    Provenance,
    read_provenance,
    write_provenance,
)

log = logging.getLogger(__name__)

OPEN_INDEXES = 2048
BROKEN_KEPT = 8
_BROKEN = ".broken"
_FILES = (".idx", ".win", PROVENANCE_SUFFIX)


@dataclass(frozen=True, slots=True)
class Glance:
    """What is seen of an index without opening it; ``disk_bytes`` are those of all its files."""

    view_bytes: int
    disk_bytes: int
    provenance: Provenance = BUILT_HERE


def _nobody(view: Digest, blob: BlobRef) -> None:
    """Nobody can index it."""


class Shelf:
    """Indexes by layer digest, in one directory of ``<hex>.idx``, ``.win`` and ``.from`` files."""

    def __init__(
        self,
        directory: Path,
        blobs_of_view: Callable[[Digest], Iterable[Digest]],
        origins: Callable[[Digest], Sequence[BlobRef]],
    ) -> None:
        self.directory = directory
        self._blobs_of_view = blobs_of_view
        self._origins = origins
        self._open: OrderedDict[Digest, LayerIndex] = OrderedDict()
        self._provenance: dict[Digest, Provenance] = {}
        self._strangers: dict[Digest, dict[Digest, None]] = {}
        self._filled: dict[Digest, Digest] = {}
        for path in directory.glob(f"*{PROVENANCE_SUFFIX}"):
            self._note_stranger(_blob_of(path), read_provenance(path))
        self._noting: Counter[Digest] = Counter()
        self._overtaken: dict[Digest, Callable[[Digest], None]] = {}
        self.index_another: Callable[[Digest, BlobRef], object] = _nobody

    def path(self, blob: Digest) -> Path:
        """Where the index of ``blob`` is, or would be."""
        return self.directory / f"{blob.hex}.idx"

    def get(self, blob: Digest) -> LayerIndex | None:
        """The index of ``blob``; one of no use is put aside, named, and counts as missing.

        UnavailableError when that can't be found out just now.
        """
        index = self._open.get(blob)
        if index is not None:
            self._open.move_to_end(blob)
            return index
        path = self.path(blob)
        try:
            index = LayerIndex.open(path, layer=blob)
        except NotFoundError:
            return None
        except RefusedError as error:
            self._put_aside(blob, error)
            return None
        self._open[blob] = index
        while len(self._open) > OPEN_INDEXES:
            self._open.popitem(last=False)
        return index

    def provenance(self, blob: Digest) -> Provenance:
        """Where the index of ``blob`` came from; built here, if there is none."""
        known = self._provenance.get(blob)
        if known is None:
            known = read_provenance(self.path(blob))
            while len(self._provenance) >= OPEN_INDEXES:
                self._provenance.pop(next(iter(self._provenance)))
            self._provenance[blob] = known
        return known

    def vouch(self, blob: Digest, provenance: Provenance) -> None:
        """Note where the index of ``blob`` comes from; before it appears. Blocks for a sync.

        OSError: it is not noted, and must not appear.
        """
        write_provenance(self.path(blob), provenance)
        self._provenance[blob] = provenance
        self._note_stranger(blob, provenance)

    def strangers(self, view: Digest) -> Iterable[Digest]:
        """The blobs by whose foreign indexes bytes of ``view`` may be here, of whatever image."""
        return tuple(self._strangers.get(view, ()))

    def _note_stranger(self, blob: Digest, provenance: Provenance) -> None:
        if provenance.own:
            self._forget_stranger(blob)
            return
        view = provenance.view
        if view is None:  # the note is damaged
            with contextlib.suppress(EmberError):
                view = LayerIndex.open(self.path(blob), layer=blob, verify=False).diff_id
        if view is not None:
            self._filled[blob] = view
            self._strangers.setdefault(view, {})[blob] = None

    def _forget_stranger(self, blob: Digest) -> None:
        view = self._filled.pop(blob, None)
        if view is not None:
            blobs = self._strangers[view]
            del blobs[blob]
            if not blobs:
                del self._strangers[view]

    @contextlib.contextmanager
    def noting(self, blob: Digest) -> Iterator[None]:
        """For as long as a thread calls `vouch`, and puts an index there after it.

        What goes meanwhile, or is built here, does so once more in the end: a note that was taken
        away between the two would leave a stranger's index to pass for our own.
        """
        self._noting[blob] += 1
        try:
            yield
        finally:
            self._noting[blob] -= 1
            if not self._noting[blob]:
                del self._noting[blob]
                again = self._overtaken.pop(blob, None)
                if again is not None:
                    again(blob)

    def rebuilt(self, blob: Digest) -> None:
        """This node has built the index of ``blob``. Whatever nobody vouched for before may have
        let bytes in that are here still, so a note of that stays until it is `renewed`."""
        self._open.pop(blob, None)
        if self.provenance(blob).vouched:
            self.renewed(blob)

    def renewed(self, blob: Digest) -> None:
        """The index of ``blob`` is our own, and its view what that says."""
        self._open.pop(blob, None)
        if blob in self._noting:
            self._overtaken[blob] = self.renewed
            return
        _remove(self.path(blob).with_suffix(PROVENANCE_SUFFIX))
        self._provenance.pop(blob, None)
        self._forget_stranger(blob)

    def _note_loss(self, blob: Digest) -> bool:
        """Before an index goes: whether its note stays, for as long as the bytes that it let in."""
        provenance = self.provenance(blob)
        if not provenance.vouched:
            self.vouch(blob, replace(provenance, lost=True))
        return not provenance.vouched

    def _put_aside(self, blob: Digest, error: RefusedError) -> None:
        """Keep the last few for whoever wants to know what was wrong with them."""
        path = self.path(blob)
        broken = path.with_suffix(_BROKEN)
        log.error("index %s is unusable and put aside as %s: %s", path, broken, error)
        try:
            lasting = self._note_loss(blob)
            _remove(broken)
            path.replace(broken)
            if not lasting:
                self._forget_provenance(path)
                self._provenance.pop(blob, None)
        except OSError as failure:
            raise UnavailableError(
                f"{error}; nor can it be put aside ({failure.strerror}): move it away"
            ) from None
        found = sorted(self.directory.glob(f"*{_BROKEN}"), key=lambda one: one.lstat().st_mtime_ns)
        for old in found[:-BROKEN_KEPT]:
            _remove(old)

    def of_view(self, view: Digest) -> Sequence[LayerSource]:
        """Every way to make chunks of ``view``; empty if no blob of it is indexed here.

        Whoever opens the view believes the first one: what nobody vouches for is the last.
        """
        sources: list[LayerSource] = []
        doubtful: list[LayerSource] = []
        for blob in dict.fromkeys((*self._blobs_of_view(view), *self.strangers(view))):
            index = self.get(blob)
            if index is not None and index.diff_id == view:
                provenance = self.provenance(blob)
                source = LayerSource(index, tuple(self._origins(blob)), provenance.windows_at)
                (sources if provenance.vouched else doubtful).append(source)
        return sources or doubtful

    def look_further(self, view: Digest) -> None:
        """Have the other blobs indexed that are said to unpack to ``view``.

        Two images may have the same layer in two packings, and only one of them was ever read.
        """
        for blob in self._blobs_of_view(view):
            with contextlib.suppress(UnavailableError):
                if self.get(blob) is None:
                    for origin in self._origins(blob)[:1]:
                        self.index_another(view, origin)

    def drop(self, blob: Digest, *, with_note: bool = True) -> None:
        """Forget and delete the index of ``blob``; without its note if its bytes are here yet:
        OSError then, if that can't be noted."""
        if not with_note:
            self._note_loss(blob)
        self._open.pop(blob, None)
        for suffix in (".idx", ".win", _BROKEN):
            _remove(self.path(blob).with_suffix(suffix))
        if not with_note:
            return
        if blob in self._noting:
            self._overtaken[blob] = self.drop
            return
        self._forget_provenance(self.path(blob))
        self._provenance.pop(blob, None)
        self._forget_stranger(blob)

    def _forget_provenance(self, path: Path) -> None:
        """Where an index came from, once it surely is gone: without that it would be our own."""
        provenance = path.with_suffix(PROVENANCE_SUFFIX)
        noting = any(path == self.path(blob) for blob in self._noting)
        if provenance.exists() and not path.exists() and not noting:
            sync_directory(path.parent)
            _remove(provenance)

    def glance(self, blobs: Iterable[Digest]) -> dict[Digest, Glance]:
        """Those of ``blobs`` that are indexed. Blocks, for a worker thread; opens none for good."""
        seen = {}
        for blob in blobs:
            with contextlib.suppress(EmberError):
                index = LayerIndex.open(self.path(blob), layer=blob, verify=False)
                seen[blob] = Glance(
                    index.view_bytes, self.bytes_on_disk(blob), read_provenance(self.path(blob))
                )
        return seen

    def bytes_on_disk(self, blob: Digest) -> int:
        """Allocated bytes of the files of ``blob``'s index."""
        total = 0
        for suffix in _FILES:
            with contextlib.suppress(OSError):
                total += self.path(blob).with_suffix(suffix).stat().st_blocks * 512
        return total


def _blob_of(path: Path) -> Digest:
    """Whose file of ours this is, by its name."""
    return Digest("sha512" if len(path.stem) == 128 else "sha256", path.stem)


def _remove(path: Path) -> None:
    """Whatever has the name of a file of ours; what can't go stays and is named."""
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        log.error("%s is not removed: %s", path, error)
