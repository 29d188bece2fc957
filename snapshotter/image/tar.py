"""The streaming tar scanner: bytes of a layer in, its tree out.

Any split of the stream gives the same tree. Headers, extended headers, the last block of each file
and what a sparse file needs in the metadata are looked at; all other data is skipped, so memory
is bounded by the tree. Knows nothing of compression, digests or EROFS.
"""

from __future__ import annotations

from collections.abc import Callable

from snapshotter.errors import RefusedError
from snapshotter.image import sparse
from snapshotter.image.assembly import TreeAssembler
from snapshotter.image.entries import entry_inode
from snapshotter.image.limits import ScanLimits
from snapshotter.image.names import shown
from snapshotter.image.pax import apply_records, parse_records
from snapshotter.image.tar_header import HEADER_ONLY, Header, checksum_fits, is_zero, number, text
from snapshotter.image.tree import BLOCK_BYTES, Inode, Kind, LayerTree, Segment

SPECIAL_BYTES = 1 << 20
"""Longest extended header, long name or sparse map, as in Go's archive/tar."""

_GLOBAL, _PAX, _LONG_NAME, _LONG_LINK, _OLD_SPARSE, _DIRECTORY = b"gxLKS5"
_PIECE_BYTES = 64 * 1024
_INDEX_BYTES = 8


class TarScanner:
    """Scans one layer.

    Life: ``feed`` with consecutive bytes until the stream ends, ``finish`` once. After a
    RefusedError the scanner is of no use any more. Bytes behind the archive's end are ignored.
    """

    def __init__(self, limits: ScanLimits | None = None) -> None:
        self._limits = limits or ScanLimits()
        self._assembler = TreeAssembler(self._limits)
        self._at = 0  # offset in the view of the next byte to be looked at or skipped
        self._skip = 0  # bytes to pass over before the next ones are looked at
        self._need = BLOCK_BYTES  # bytes that _take wants next
        self._take: Callable[[bytes], None] = self._on_header
        self._held = bytearray()  # their first part, when a feed ended within them
        self._zero_seen = False
        self._ended = False
        self._data_end = 0  # where the data of the entry at hand ends, without padding
        self._header: Header | None = None
        self._records: dict[bytes, bytes] = {}
        self._long_name = self._long_link = b""
        self._inode: Inode | None = None
        self._sparse: _SparseEntry | None = None
        self._sparse_pieces = 0
        self._inline_bytes = 0

    def feed(self, data: memoryview | bytes) -> None:
        """Take the next bytes of the plain tar. RefusedError names the entry and its fault."""
        view = memoryview(data).cast("B")
        offset, end = 0, len(view)
        while offset < end:
            if self._skip:
                step = min(self._skip, end - offset)
                self._skip -= step
                self._at += step
                offset += step
                continue
            if self._ended:
                self._at += end - offset
                return
            step = min(self._need - len(self._held), end - offset)
            part = bytes(view[offset : offset + step])
            offset += step
            self._at += step
            if self._held or step < self._need:
                self._held += part
                if len(self._held) < self._need:
                    return
                part = bytes(self._held)
                self._held.clear()
            try:
                self._take(part)
            except RefusedError as error:
                raise self._named(error) from None

    def finish(self) -> LayerTree:
        """The layer's tree. RefusedError if the stream ended too early."""
        try:
            if not self._ended:
                self._check_end()
            return self._assembler.finish(self._at)
        except RefusedError as error:
            raise self._named(error) from None

    def _check_end(self) -> None:
        """The stream ended without the two zero blocks: right between entries, or in padding."""
        if self._at < self._data_end:
            lack = self._data_end - self._at
            raise RefusedError(f"the stream ends {lack} bytes before its data do")
        if self._take == self._on_tail:
            self._on_tail(bytes(self._held).ljust(BLOCK_BYTES, b"\xff"))
        elif self._held or self._take != self._on_header:
            raise RefusedError("the stream ends within a header")

    def _named(self, error: RefusedError) -> RefusedError:
        name = shown(self._header.name) + ", " if self._header else ""
        return RefusedError(f"tar: {name}before byte {self._at}: {error}")

    def _expect(self, take: Callable[[bytes], None], need: int, *, skip: int = 0) -> None:
        self._take, self._need, self._skip = take, need, skip

    def _next_header(self) -> None:
        """The entry at hand is done: pass over what is left of it."""
        padded = -(-self._data_end // BLOCK_BYTES) * BLOCK_BYTES
        self._header = self._inode = self._sparse = None
        self._expect(self._on_header, BLOCK_BYTES, skip=max(0, padded - self._at))

    def _on_header(self, block: bytes) -> None:
        if is_zero(block):
            self._ended = self._zero_seen
            self._zero_seen = True
            return
        if self._zero_seen:
            raise RefusedError("a block of zeros, and then not the second one that ends a tar")
        if not checksum_fits(block):
            raise RefusedError("this is no tar header: its checksum is wrong")
        header = Header(block)
        if header.type not in (_PAX, _GLOBAL, _LONG_NAME, _LONG_LINK):
            self._on_entry(header)
            return
        self._header = header
        if header.size < 0:
            raise RefusedError("a size below zero")
        self._data_end = self._at + header.size
        if header.type == _GLOBAL:  # speaks of the archive; image layers ignore it wholly
            self._next_header()
        elif header.size > SPECIAL_BYTES:
            raise RefusedError(f"an extended header of {header.size} bytes")
        elif header.size:
            self._expect(self._on_special, -(-header.size // BLOCK_BYTES) * BLOCK_BYTES)
        else:
            self._on_special(b"")

    def _on_special(self, data: bytes) -> None:
        """An extended header or a long name, for the entry that follows."""
        assert self._header is not None
        data = data[: self._header.size]
        if self._header.type == _PAX:
            self._records = parse_records(data)
        elif self._header.type == _LONG_NAME:
            self._long_name = text(data)
        else:
            self._long_link = text(data)
        self._next_header()

    def _on_entry(self, header: Header) -> None:
        self._header = header
        records = self._records
        if records:
            apply_records(header, records)
        header.name = self._long_name or header.name
        header.link = self._long_link or header.link
        self._long_name = self._long_link = b""
        if header.type == 0 and header.name[-1:] == b"/":
            header.type = _DIRECTORY  # V7 had no type for directories
        if header.type in HEADER_ONLY:
            header.size = 0
        self._data_end = self._at + header.size
        if not 0 <= header.size <= self._data_end <= self._limits.view_bytes:
            raise RefusedError(f"declares {header.size} bytes of data")
        if header.type == _OLD_SPARSE:
            self._on_old_sparse(header)
        elif records and sparse.is_pax_sparse(records):
            self._on_pax_sparse(header, records)
        else:
            self._on_plain(header)

    def _admit(self) -> Inode | None:
        """Put the entry into the tree; None if nothing wants its data."""
        header, records = self._header, self._records
        assert header is not None
        if records:
            self._records = {}
        place = self._assembler.locate(header.name, header.mtime_ns)
        if place is None:
            return None
        if self._assembler.is_mark(place.base):
            self._assembler.hide(place)
            return None
        inode = entry_inode(header, records)
        self._assembler.put(place, inode)
        return inode if inode.kind is Kind.FILE else None

    def _on_plain(self, header: Header) -> None:
        self._inode = inode = self._admit()
        if inode is None or not header.size:
            self._next_header()
            return
        inode.size = header.size
        inode.segments = (Segment(0, header.size, self._at),)
        tail = header.size % BLOCK_BYTES
        if tail:
            self._expect(self._on_tail, BLOCK_BYTES, skip=header.size - tail)
        else:
            self._next_header()

    def _on_tail(self, block: bytes) -> None:
        """A file's last, partial block: readers that map it must find zeros behind its end.

        If the tar does not have them there, the tail goes into the metadata; not for files so
        large that its chunk table (8 bytes a block) would be worse than that.
        """
        inode = self._inode
        assert inode is not None
        tail = inode.size % BLOCK_BYTES
        if block.count(0, tail) != BLOCK_BYTES - tail:
            whole = inode.size - tail
            cost = whole // BLOCK_BYTES * _INDEX_BYTES + BLOCK_BYTES
            if self._inline_bytes + cost <= self._limits.inline_bytes:
                self._inline_bytes += cost
                first = (Segment(0, whole, inode.segments[0].view_offset),) if whole else ()
                inode.segments = (*first, Segment(whole, tail, -1, block[:tail]))
            elif len(self._held):
                raise RefusedError("the stream ends within the padding of a huge file")
        self._next_header()

    def _on_old_sparse(self, header: Header) -> None:
        raw = header.raw
        if raw[257:265] != b"ustar  \0":
            raise RefusedError("a sparse entry of another tar than GNU's")
        self._sparse = _SparseEntry(number(raw[483:495]), header.size)
        self._sparse.pieces = sparse.map_of_block(raw[386:482], 4)
        if raw[482]:
            self._data_end += BLOCK_BYTES
            self._expect(self._on_sparse_extension, BLOCK_BYTES)
        else:
            self._open_sparse()

    def _on_sparse_extension(self, block: bytes) -> None:
        entry = self._sparse
        assert entry is not None
        entry.pieces += sparse.map_of_block(block, 21)
        self._check_pieces(len(entry.pieces))
        if block[504]:
            self._data_end += BLOCK_BYTES
            self._expect(self._on_sparse_extension, BLOCK_BYTES)
        else:
            self._open_sparse()

    def _on_pax_sparse(self, header: Header, records: dict[bytes, bytes]) -> None:
        stored = header.size
        header.name = sparse.pax_name(records) or header.name
        size = sparse.pax_size(records)
        self._sparse = _SparseEntry(stored if size is None else size, stored)
        if header.type in HEADER_ONLY:
            raise RefusedError("sparse, and of a type that has no data")
        if sparse.has_map_in_data(records):
            self._want_map_block()
        else:
            self._sparse.pieces = sparse.map_of_records(records)
            self._open_sparse()

    def _want_map_block(self) -> None:
        assert self._sparse is not None
        if self._sparse.stored < BLOCK_BYTES:
            raise RefusedError("sparse map: longer than the entry")
        self._expect(self._on_map_block, BLOCK_BYTES)

    def _on_map_block(self, block: bytes) -> None:
        entry = self._sparse
        assert entry is not None
        entry.stored -= BLOCK_BYTES
        entry.map += block
        entry.lines += block.count(b"\n")
        if len(entry.map) > SPECIAL_BYTES:
            raise RefusedError(f"sparse map: longer than {SPECIAL_BYTES} bytes")
        if entry.lines and not entry.wanted:
            entry.wanted = sparse.map_lines_wanted(entry.map)
        if not entry.wanted or entry.lines < entry.wanted:
            self._want_map_block()
            return
        entry.pieces = sparse.map_of_lines(bytes(entry.map), entry.wanted)
        self._open_sparse()

    def _check_pieces(self, count: int) -> None:
        if self._sparse_pieces + count > self._limits.sparse_pieces:
            raise RefusedError(f"sparse maps of more than {self._limits.sparse_pieces} pieces")

    def _open_sparse(self) -> None:
        """The map is known: plan where the pieces lie, and fetch those the view can't serve."""
        entry = self._sparse
        assert entry is not None
        sparse.check_map(entry.pieces, entry.size, entry.stored)
        self._check_pieces(len(entry.pieces))
        self._sparse_pieces += len(entry.pieces)
        self._inode = inode = self._admit()
        if inode is None:
            self._next_header()
            return
        inode.size = entry.size
        limit = self._limits.inline_bytes - self._inline_bytes
        entry.plan = sparse.plan(entry.pieces, entry.size, self._at, inline_limit=limit)
        self._inline_bytes += entry.plan.cost_bytes
        entry.captures = entry.plan.captures[::-1]
        self._next_capture()

    def _next_capture(self) -> None:
        entry, inode = self._sparse, self._inode
        assert entry is not None and inode is not None and entry.plan is not None
        if entry.captures:
            wanted = entry.captures[-1]
            need = min(wanted.length, _PIECE_BYTES)
            self._expect(self._on_capture, need, skip=wanted.view_offset - self._at)
        else:
            inode.segments = entry.plan.settle()
            self._next_header()

    def _on_capture(self, data: bytes) -> None:
        entry = self._sparse
        assert entry is not None
        wanted = entry.captures.pop()
        wanted.buffer[wanted.at : wanted.at + len(data)] = data
        if len(data) < wanted.length:
            entry.captures.append(wanted.behind(len(data)))
        self._next_capture()


class _SparseEntry:
    """What is known so far of the sparse entry at hand."""

    __slots__ = ("captures", "lines", "map", "pieces", "plan", "size", "stored", "wanted")

    def __init__(self, size: int, stored: int) -> None:
        self.size = size
        self.stored = stored
        self.pieces: list[sparse.Data] = []
        self.map = bytearray()
        self.lines = 0
        self.wanted = 0
        self.plan: sparse.SparsePlan | None = None
        self.captures: list[sparse.Capture] = []
