"""The words of the project as values: digests, extents, chunks. Pure; every floor knows them.

A *view* is the plain form of a blob, named by the digest of its plain bytes (for an OCI layer:
its diffID), so two blobs that unpack to the same bytes share one view.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from snapshotter.errors import InvalidArgumentError

CHUNK_BYTES = 64 * 1024
"""Plain bytes of a chunk, the unit of presence and verification; a view's last is shorter."""

_HEX_LENGTHS = {"sha256": 64, "sha512": 128}
_DIGEST = re.compile(r"(sha256|sha512):([0-9a-f]+)", re.ASCII)


class Compression(StrEnum):
    """How a blob is stored, found by its content and never by its label."""

    PLAIN = "plain"
    GZIP = "gzip"
    ZSTD = "zstd"


@dataclass(frozen=True, slots=True, order=True)
class Digest:
    """A content digest as OCI writes it: ``algorithm:hex`` (image-spec, descriptor.md)."""

    algorithm: str
    hex: str

    @classmethod
    def parse(cls, text: str) -> Digest:
        """Parse ``sha256:…`` or ``sha512:…``; InvalidArgumentError names what is wrong with it."""
        match = _DIGEST.fullmatch(text)
        if match is None or len(match[2]) != _HEX_LENGTHS[match[1]]:
            raise InvalidArgumentError(f"not a digest that OCI allows: {text[:200]!r}")
        return cls(match[1], match[2])

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.hex}"


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """Bytes [offset, offset + length) of something byte-addressable."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """The first offset behind the extent."""
        return self.offset + self.length

    def chunks(self, chunk_bytes: int) -> range:
        """The numbers of the chunks that the extent touches; empty if its length is 0."""
        if self.length == 0:
            return range(0)
        return range(self.offset // chunk_bytes, -(-self.end // chunk_bytes))


@dataclass(frozen=True, slots=True)
class BlobRef:
    """A blob in a registry's repository, e.g. ``registry.example:5000/team/app`` with its digest.

    ``size_bytes`` is the stored (compressed) length that the manifest promised.
    """

    repository: str
    digest: Digest
    size_bytes: int


def chain_ids(diff_ids: Sequence[Digest]) -> list[Digest]:
    """The chain ID of each layer (image-spec, config.md, "Layer ChainID")."""
    chain: list[Digest] = []
    for diff_id in diff_ids:
        if not chain:
            chain.append(diff_id)
            continue
        joined = f"{chain[-1]} {diff_id}".encode()
        chain.append(Digest("sha256", hashlib.sha256(joined).hexdigest()))
    return chain
