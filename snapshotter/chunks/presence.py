"""The presence file of a view: which of its chunks are here, as two bitmaps.

*readable* is mapped and shared with the guard's C thread; it is believed only within the boot that
wrote it, because it may reach the disk before the data does. *durable* is written in batches after
the data was synced, into two slots in turn, so a torn write costs one batch and never the truth.
Whatever does not check out means "nothing is here". It does not know where the data lies.

Layout (little-endian): a header in the first 512 of 4096 bytes; the readable bitmap; two durable
slots of 64 bytes of header and a bitmap each. Every part starts on a multiple of 4096.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path

from blake3 import blake3

from ioengine.bitmap import Bitmap
from ioengine.threads import write_fully
from snapshotter.content import Digest
from snapshotter.errors import InvalidArgumentError, RefusedError

log = logging.getLogger(__name__)

MAGIC = b"EMBRPRES"
SLOT_MAGIC = b"EMBRDURA"
VERSION = 1
BLOCK = 4096
READABLE_OFFSET = BLOCK
"""Where the readable bitmap starts in a presence file."""
_CLEAN, _SUSPECT = 1, 2
_HEADER = struct.Struct("<8sIIQQ16sI144s")
_SLOT = struct.Struct("<8sQQ16s")
_SLOT_HEADER_BYTES = 64
_CHECKSUM_BYTES = 16


def boot_id() -> bytes:
    """The 16 bytes that name this boot of the kernel (proc(5), random/boot_id)."""
    text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    return bytes.fromhex(text.strip().replace("-", ""))


@dataclass(frozen=True, slots=True)
class Header:
    """What a presence file says of itself.

    ``clean``: whoever wrote last closed the view in order. ``suspect``: durable chunks have not
    been read back since a boot that did not end in order, or since a failed sync.
    """

    view: Digest
    view_bytes: int
    chunk_bytes: int
    boot: bytes
    clean: bool
    suspect: bool

    @property
    def chunk_count(self) -> int:
        """How many chunks the view has."""
        return -(-self.view_bytes // self.chunk_bytes)

    @property
    def bitmap_bytes(self) -> int:
        """Bytes of one bitmap, without padding."""
        return (self.chunk_count + 7) // 8


def encode_header(header: Header) -> bytes:
    """The 512 bytes at the start of the file: one sector, so a disk writes all of it or nothing."""
    flags = (_CLEAN if header.clean else 0) | (_SUSPECT if header.suspect else 0)
    body = _HEADER.pack(
        MAGIC,
        VERSION,
        header.chunk_bytes,
        header.chunk_count,
        header.view_bytes,
        header.boot,
        flags,
        str(header.view).encode("ascii"),
    )
    return (body + _sum(body)).ljust(512, b"\0")


def decode_header(raw: bytes) -> Header:
    """Undo encode_header(); RefusedError says what does not check out."""
    body, checksum = raw[: _HEADER.size], raw[_HEADER.size : _HEADER.size + _CHECKSUM_BYTES]
    if len(checksum) != _CHECKSUM_BYTES or checksum != _sum(body):
        raise RefusedError("presence file: the header's checksum is wrong")
    magic, version, chunk_bytes, count, view_bytes, boot, flags, name = _HEADER.unpack(body)
    if magic != MAGIC or version != VERSION:
        raise RefusedError(f"presence file: version {version} of {magic!r} is not known here")
    try:
        view = Digest.parse(name.rstrip(b"\0").decode("ascii"))
    except (UnicodeDecodeError, InvalidArgumentError) as error:
        raise RefusedError(f"presence file: names no view: {error}") from error
    if chunk_bytes == 0 or chunk_bytes % BLOCK or count != -(-view_bytes // chunk_bytes):
        raise RefusedError(
            f"presence file of {view}: {count} chunks of {chunk_bytes} bytes "
            f"cannot be a view of {view_bytes} bytes"
        )
    return Header(view, view_bytes, chunk_bytes, boot, bool(flags & _CLEAN), bool(flags & _SUSPECT))


def encode_slot(generation: int, bitmap: bytes) -> bytes:
    """One durable slot, unpadded; the checksum covers the generation too."""
    body = SLOT_MAGIC + struct.pack("<QQ", generation, len(bitmap))
    return (body + _sum(body + bitmap)).ljust(_SLOT_HEADER_BYTES, b"\0") + bitmap


def decode_slot(raw: bytes, bitmap_bytes: int) -> tuple[int, bytes] | None:
    """(generation, bitmap) of a slot that checks out, else None."""
    if len(raw) < _SLOT_HEADER_BYTES + bitmap_bytes:
        return None
    magic, generation, length, checksum = _SLOT.unpack(raw[: _SLOT.size])
    bitmap = raw[_SLOT_HEADER_BYTES : _SLOT_HEADER_BYTES + bitmap_bytes]
    if magic != SLOT_MAGIC or length != bitmap_bytes:
        return None
    body = raw[: _SLOT.size - _CHECKSUM_BYTES]
    return (generation, bitmap) if checksum == _sum(body + bitmap) else None


class Presence:
    """An open presence file. Everything but ``readable`` and ``durable`` blocks on the disk.

    One owner at a time (the daemon holds the store's lock); ``readable`` may be used from threads.
    """

    def __init__(self, fd: int, header: Header) -> None:
        self.fd = fd
        self.header = header
        self._generation = 0
        self._slot = 0
        self._mapping = mmap.mmap(fd, _readable_bytes(header), offset=BLOCK)
        self.readable = Bitmap(self._mapping, 0, header.chunk_count)
        self.durable = bytes(header.bitmap_bytes)

    @classmethod
    def open(cls, path: Path, wanted: Header, *, trusted: bool) -> Presence:
        """Open or create the presence file for ``wanted`` (whose ``boot`` is this boot).

        Unless ``trusted`` (the data file is what it was), and the file is about this very view,
        everything is missing. Within one boot the readable bits are kept; after another boot only
        the durable ones count, and they are suspect unless that boot closed the view in order.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            found = _found(fd, wanted) if trusted else None
            slots = _read_slots(fd, found) if found else []
            if found is None:
                _format(fd, wanted)
            presence = cls(fd, found or wanted)
        except BaseException:
            os.close(fd)
            raise
        try:
            presence._start(found, slots, wanted.boot)
        except BaseException:
            presence.close()
            raise
        return presence

    def write_durable(self, bitmap: bytes) -> None:
        """Make ``bitmap`` the durable one; returns when the disk has it.

        The caller has synced the data of every chunk in it. OSError: the old one still holds.
        """
        slot, generation = 1 - self._slot, self._generation + 1
        write_fully(self.fd, encode_slot(generation, bitmap), _slot_offset(self.header, slot))
        os.fdatasync(self.fd)
        self._slot, self._generation, self.durable = slot, generation, bitmap

    def mark(self, *, clean: bool | None = None, suspect: bool | None = None) -> None:
        """Change the header's flags; returns when the disk has them."""
        header = replace(
            self.header,
            clean=self.header.clean if clean is None else clean,
            suspect=self.header.suspect if suspect is None else suspect,
        )
        if header != self.header:
            self._write_header(header)

    def close(self) -> None:
        """Unmap and close; what was not written durably is left to the kernel."""
        if self.fd < 0:
            return
        try:
            self.readable.close()
            self._mapping.close()
        except BufferError:  # it stays mapped for as long as they look at it
            log.error("the readable bitmap of %s is still in use by others", self.header.view)
        os.close(self.fd)
        self.fd = -1

    def _start(
        self, found: Header | None, slots: list[tuple[int, int, bytes]], boot: bytes
    ) -> None:
        if found is None:
            return
        on_disk = found
        for generation, slot, bitmap in slots:
            if generation > self._generation:
                self._generation, self._slot, self.durable = generation, slot, bitmap
        self.durable = _mask_tail(self.durable, found.chunk_count)
        readable = self.durable
        if found.boot == boot:
            readable = _mask_tail(self.readable.snapshot(), found.chunk_count)
        else:
            # The bitmap is on the disk before the header vouches for it as this boot's.
            found = replace(found, boot=boot, suspect=found.suspect or not found.clean)
        if readable != self.readable.snapshot():
            self.readable.memory[:] = readable
            self._mapping.flush()
        settled = found.clean and not found.suspect and _full(self.durable, found.chunk_count)
        self.header = replace(found, clean=settled)
        if self.header != on_disk:  # after a kill it says so already: hundreds are opened at once
            self._write_header(self.header)

    def _write_header(self, header: Header) -> None:
        write_fully(self.fd, encode_header(header), 0)
        os.fdatasync(self.fd)
        self.header = header


def read_presence(path: Path, boot: bytes) -> tuple[Header, bytes]:
    """(header, the bitmap to be believed in ``boot``) without opening the view.

    FileNotFoundError, or RefusedError when nothing in the file can be believed.
    """
    with path.open("rb") as file:
        header = decode_header(file.read(512))
        if header.boot == boot:
            file.seek(BLOCK)
            return header, _mask_tail(file.read(header.bitmap_bytes), header.chunk_count)
        slots = _read_slots(file.fileno(), header)
    newest = max(slots, default=(0, 0, bytes(header.bitmap_bytes)))
    return header, _mask_tail(newest[2], header.chunk_count)


def _sum(data: bytes) -> bytes:
    return blake3(data).digest(_CHECKSUM_BYTES)


def _padded(length: int) -> int:
    return -(-length // BLOCK) * BLOCK


def _readable_bytes(header: Header) -> int:
    return _padded(max(1, header.bitmap_bytes))


def _slot_offset(header: Header, slot: int) -> int:
    slot_bytes = _padded(_SLOT_HEADER_BYTES + header.bitmap_bytes)
    return BLOCK + _readable_bytes(header) + slot * slot_bytes


def _found(fd: int, wanted: Header) -> Header | None:
    """The header in the file if it is about the view that is wanted and the file is all there."""
    with contextlib.suppress(RefusedError):
        found = decode_header(os.pread(fd, 512, 0))
        same = (found.view, found.view_bytes, found.chunk_bytes) == (
            wanted.view,
            wanted.view_bytes,
            wanted.chunk_bytes,
        )
        if same and os.fstat(fd).st_size == _slot_offset(found, 2):
            return found
    return None


def _format(fd: int, header: Header) -> None:
    """An empty file for ``header``: old content is gone before the header vouches for the new.

    All of it is allocated: a store into a mapped hole of a full disk would be SIGBUS.
    """
    os.ftruncate(fd, 0)
    os.posix_fallocate(fd, 0, _slot_offset(header, 2))
    os.fsync(fd)
    write_fully(fd, encode_header(header), 0)
    os.fdatasync(fd)


def _read_slots(fd: int, header: Header) -> list[tuple[int, int, bytes]]:
    """(generation, slot, bitmap) of each slot that checks out."""
    slots = []
    for slot in (0, 1):
        length = _SLOT_HEADER_BYTES + header.bitmap_bytes
        decoded = decode_slot(os.pread(fd, length, _slot_offset(header, slot)), header.bitmap_bytes)
        if decoded is not None:
            slots.append((decoded[0], slot, decoded[1]))
    return slots


def _mask_tail(bitmap: bytes, count: int) -> bytes:
    """``bitmap`` with the bits behind ``count`` cleared."""
    value = int.from_bytes(bitmap, "little") & ((1 << count) - 1)
    return value.to_bytes(len(bitmap), "little")


def _full(bitmap: bytes, count: int) -> bool:
    return int.from_bytes(bitmap, "little").bit_count() == count
