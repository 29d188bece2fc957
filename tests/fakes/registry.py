"""A registry in memory that speaks the real wire, with faults to switch on.

What it serves well follows distribution-spec 1.1; what it does badly are the odd registries that
other clients met. `inject` puts a fault between a request and its answer.
"""

from __future__ import annotations

import hashlib
import json
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from snapshotter.content import Digest
from tests.fakes.http_server import Answer, HttpServer, Seen

Change = Callable[[Seen, Answer], Answer]
When = Callable[[Seen], bool]

_PATH = re.compile(r"/v2/(?P<repository>.+)/(?P<kind>manifests|blobs)/(?P<name>[^/]+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class Gate(Protocol):
    """Decides whether a request may pass: None, or the answer that refuses it."""

    def check(self, seen: Seen) -> Answer | None: ...


@dataclass
class _Fault:
    change: Change
    when: When
    left: int | None


@dataclass
class Repository:
    """Blobs and manifests by digest, and tags."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


def sha256(data: bytes) -> Digest:
    return Digest("sha256", hashlib.sha256(data).hexdigest())


def is_blob(seen: Seen) -> bool:
    return "/blobs/" in seen.path


def is_manifest(seen: Seen) -> bool:
    return "/manifests/" in seen.path


def is_range(seen: Seen) -> bool:
    return "range" in seen.headers


class FakeRegistry(HttpServer):
    """Serves what was added to it."""

    def __init__(self, tls: ssl.SSLContext | None = None, address: str = "127.0.0.1") -> None:
        super().__init__(tls, address)
        self.repositories: dict[str, Repository] = {}
        self.gate: Gate | None = None
        self._faults: list[_Fault] = []
        self._pages: dict[str, Callable[[Seen], Answer]] = {}

    def add_blob(self, repository: str, data: bytes, digest: Digest | None = None) -> Digest:
        """Add a blob; ``digest`` makes it lie about what it is."""
        digest = digest or sha256(data)
        self.repository(repository).blobs[str(digest)] = data
        return digest

    def add_manifest(
        self, repository: str, data: bytes, media_type: str, tag: str | None = None
    ) -> Digest:
        digest = sha256(data)
        found = self.repository(repository)
        found.manifests[str(digest)] = (data, media_type)
        if tag is not None:
            found.tags[tag] = str(digest)
        return digest

    def repository(self, name: str) -> Repository:
        return self.repositories.setdefault(name, Repository())

    def page(self, path: str, answer: Callable[[Seen], Answer]) -> None:
        """Serve another path too (a token service, a storage host); the gate does not guard it."""
        self._pages[path] = answer

    def inject(
        self, change: Change, when: When = lambda seen: True, times: int | None = None
    ) -> None:
        """Change the answers to requests for which ``when`` holds, the first ``times`` of them."""
        self._faults.append(_Fault(change, when, times))

    def heal(self) -> None:
        """Take all faults away."""
        self._faults.clear()
        self.refuses = lambda connection: False

    def asked(self, part: str) -> list[Seen]:
        """The requests whose target contains ``part``."""
        return [seen for seen in self.seen if part in seen.target]

    async def handle(self, seen: Seen) -> Answer:
        answer = self._answer(seen)
        for fault in self._faults:
            if fault.left != 0 and fault.when(seen):
                if fault.left is not None:
                    fault.left -= 1
                answer = fault.change(seen, answer)
        return answer

    def _answer(self, seen: Seen) -> Answer:
        page = self._pages.get(seen.path)
        if page is not None:
            return page(seen)
        refusal = self.gate.check(seen) if self.gate else None
        if refusal is not None:
            return refusal
        if seen.path == "/v2/":
            return Answer()
        match = _PATH.fullmatch(seen.path)
        if match is None or seen.method not in ("GET", "HEAD"):
            return error(404, "UNSUPPORTED")
        found = self.repositories.get(match["repository"])
        if found is None:
            return error(404, "NAME_UNKNOWN")
        if match["kind"] == "manifests":
            return self._manifest(found, match["name"])
        data = found.blobs.get(match["name"])
        return error(404, "BLOB_UNKNOWN") if data is None else serve(seen, data)

    def _manifest(self, found: Repository, name: str) -> Answer:
        digest = found.tags.get(name, name)
        if digest not in found.manifests:
            return error(404, "MANIFEST_UNKNOWN")
        data, media_type = found.manifests[digest]
        headers = [("Content-Type", media_type), ("Docker-Content-Digest", digest)]
        return Answer(200, headers, data)


def serve(seen: Seen, data: bytes) -> Answer:
    """The blob or the range of it that was asked for."""
    headers = [("Content-Type", "application/octet-stream"), ("Accept-Ranges", "bytes")]
    match = _RANGE.fullmatch(seen.headers.get("range", ""))
    if match is None:
        return Answer(200, headers, data)
    start = int(match[1])
    end = min(int(match[2]) if match[2] else len(data) - 1, len(data) - 1)
    if start >= len(data):
        return Answer(416, [("Content-Range", f"bytes */{len(data)}")])
    headers.append(("Content-Range", f"bytes {start}-{end}/{len(data)}"))
    return Answer(206, headers, data[start : end + 1])


def error(status: int, code: str, headers: list[tuple[str, str]] | None = None) -> Answer:
    """An error as the distribution-spec writes it."""
    body = json.dumps({"errors": [{"code": code, "message": code.lower()}]}).encode()
    return Answer(status, [("Content-Type", "application/json"), *(headers or [])], body)


def answer_with(status: int, *headers: tuple[str, str]) -> Change:
    """A fault: another status and no body."""
    return lambda seen, answer: error(status, "TEST", list(headers))


def cut(after: int, how: str = "close") -> Change:
    """A fault: the body stops after so many bytes (-1: before the head)."""

    def change(seen: Seen, answer: Answer) -> Answer:
        answer.cut_after, answer.cut = after, how
        return answer

    return change


def flip(position: int = 0) -> Change:
    """A fault: one byte of the body is wrong, if it is that long."""

    def change(seen: Seen, answer: Answer) -> Answer:
        body = bytearray(answer.body)
        if position < len(body):
            body[position] ^= 0xFF
        answer.body = bytes(body)
        return answer

    return change


def header(name: str, value: str | None) -> Change:
    """A fault: a header replaced, or (None) removed."""

    def change(seen: Seen, answer: Answer) -> Answer:
        answer.set(name, value)
        return answer

    return change
