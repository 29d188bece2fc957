"""Whose indexes count: an index says what a pinned digest means, so not everybody's may.

Built here, or found right by comparison: always. Signed: while the key lies in the directory of
trusted keys, which is read each time. Unsigned: only if ``trust = "registry"``, and until it was
compared only for images of a repository that offered it: who can push to one must not decide what
another's layers mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from snapshotter.imagefs.provenance import Origin, Provenance
from snapshotter.indexes.keys import Keyring, TrustedKeys

SIGNED, REGISTRY = "signed", "registry"


@dataclass(frozen=True, slots=True)
class Trust:
    """``mode`` is signed or registry; ``keys`` is where the trusted ones lie."""

    mode: str
    keys: TrustedKeys

    def fault(self, provenance: Provenance, repository: str, ring: Keyring) -> str | None:
        """Why an index of this origin is not used for an image of ``repository``; None: it is.

        ``ring`` is what `keys` holds now.
        """
        if provenance.own or (provenance.origin is Origin.SIGNED and provenance.key in ring.keys):
            return None
        if self.mode == REGISTRY and provenance.origin is not Origin.UNKNOWN:
            if repository in provenance.repositories:
                return None
            offered = provenance.repositories[0] if provenance.repositories else "another place"
            return f"it came unsigned from {offered}, and is not compared yet"
        if provenance.origin is Origin.SIGNED:
            return f"it is signed by key {short(provenance.key)}, which {self.keys.directory} lacks"
        if provenance.origin is Origin.REGISTRY:
            return 'it came unsigned, and index.trust is no longer "registry"'
        return "where it came from can't be read any more"

    def notes(self) -> list[str]:
        """What an operator is reminded of."""
        if self.mode != REGISTRY:
            return []
        return [
            'index.trust = "registry": whoever can push beside an image decides what it shows until'
            " it is complete and compared"
        ]


def short(key: str) -> str:
    """So much of a key's id as people compare."""
    return key[:16]
