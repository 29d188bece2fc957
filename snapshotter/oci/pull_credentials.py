"""Credentials of pulls, kept beyond the life of this process, and forgotten with their images.

A pod that runs makes no pull again: what its reads need after a restart of the daemon must be here
already. So it is kept in memory that others hold too, and on no disk.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from typing import Any, Protocol

from snapshotter.errors import InvalidArgumentError
from snapshotter.oci.credentials import Credential, MemoryCredentials

log = logging.getLogger(__name__)

_VERSION = 1
_IDS_LIMIT = 4096
_REFS_PER_ID = 64
_KEYS = ("username", "password", "identity_token", "registry_token")


class Slate(Protocol):
    """Where one value is kept; what is saved takes the place of what was there."""

    @property
    def capacity_bytes(self) -> int: ...

    def load(self) -> bytes:
        """What was saved last; empty if nothing was."""
        ...

    def save(self, data: bytes) -> None: ...


class PullCredentials(MemoryCredentials):
    """What pulls taught. Without a slate it is gone when the process ends."""

    def __init__(self) -> None:
        super().__init__("credentials of pulls")
        self._refs_by_id: OrderedDict[str, list[str]] = OrderedDict()
        self._slate: Slate | None = None

    def keep_on(self, slate: Slate) -> None:
        """Know what is on ``slate`` too, and keep it up to date from now on."""
        data = slate.load()
        if data:
            try:
                self._know(json.loads(data))
            except (ValueError, TypeError, LookupError, RecursionError, InvalidArgumentError):
                log.error("what an earlier daemon kept of pull secrets can't be read; not used")
        self._slate = slate
        self._save()

    def put(self, image_ref: str, credential: Credential, server_address: str = "") -> bool:
        kept = super().put(image_ref, credential, server_address)
        if kept:
            self._save()
        return kept

    def forget(self, image_ref: str, credential: Credential | None = None) -> bool:
        forgotten = super().forget(image_ref, credential)
        if forgotten:
            self._save()
        return forgotten

    def is_image(self, image_id: str, image_ref: str) -> None:
        """A pull of ``image_ref`` brought the image ``image_id``."""
        refs = self._refs_by_id.setdefault(image_id, [])
        self._refs_by_id.move_to_end(image_id)
        if image_ref in refs:
            refs.remove(image_ref)
        refs.append(image_ref)
        del refs[:-_REFS_PER_ID]
        if len(self._refs_by_id) > _IDS_LIMIT:
            self._refs_by_id.popitem(last=False)
        self._save()

    def forget_image(self, image: str) -> None:
        """Forget an image, by reference or by id, with all references that it has."""
        self.forget(image)
        gone = [key for key, refs in self._refs_by_id.items() if key == image or image in refs]
        for image_id in gone:
            for ref in self._refs_by_id.pop(image_id):
                self.forget(ref)
        self._save()

    def _know(self, document: dict[str, Any]) -> None:
        if document["version"] != _VERSION:
            raise ValueError(document["version"])
        for image_ref, credentials in document["pulls"]:
            for credential in credentials:
                if not all(isinstance(word, str) for word in (image_ref, *credential)):
                    raise TypeError("words were expected")
                super().put(image_ref, Credential(**dict(zip(_KEYS, credential, strict=True))))
        for image_id, refs in document["ids"]:
            self._refs_by_id[str(image_id)] = [str(ref) for ref in refs]

    def _save(self) -> None:
        """The latest of them, if not all fit."""
        if self._slate is None:
            return
        pulls = [
            (ref, [[getattr(credential, key) for key in _KEYS] for credential in credentials])
            for ref, credentials in self.items()
        ]
        ids = list(self._refs_by_id.items())
        while True:
            document = {"version": _VERSION, "pulls": pulls, "ids": ids}
            data = json.dumps(document, separators=(",", ":")).encode()
            if len(data) <= self._slate.capacity_bytes:
                break
            log.warning("the oldest of %d pull secrets are not kept for a restart", len(pulls))
            pulls, ids = pulls[len(pulls) // 8 + 1 :], ids[len(ids) // 8 + 1 :]
        self._slate.save(data)
