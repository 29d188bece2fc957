"""The registry in memory, which can be pushed to, with the referrers API or without.

As distribution-spec 1.1 has it; what it holds against a client it says with a status.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tests.fakes.http_server import Answer, Seen
from tests.fakes.registry import FakeRegistry, Repository, error, sha256

OCI_INDEX = "application/vnd.oci.image.index.v1+json"

_UPLOADS = re.compile(r"/v2/(?P<repository>.+)/blobs/uploads/(?P<upload>\d*)")
_PUT = re.compile(r"/v2/(?P<repository>.+)/manifests/(?P<name>[^/]+)")
_REFERRERS = re.compile(r"/v2/(?P<repository>.+)/referrers/(?P<digest>[^/]+)")


class WritableRegistry(FakeRegistry):
    """``api``: whether it knows referrers; ``filters``: whether it filters them by type;
    ``page``: how many it lists at once; ``whole`` and ``pieces``: how it takes uploads."""

    def __init__(self, *, api: bool = True) -> None:
        super().__init__()
        self.api = api
        self.filters = True
        self.page_entries = 100
        self.whole_bytes = 2**40
        self.pieces = True
        self._uploads: dict[str, bytes] = {}

    def referrers(self, repository: str, digest: str) -> list[dict[str, Any]]:
        """What the API lists."""
        found = []
        for known, (data, media_type) in self.repository(repository).manifests.items():
            document = json.loads(data)
            if document.get("subject", {}).get("digest") == digest:
                entry = {"mediaType": media_type, "digest": known, "size": len(data)}
                kind = document.get("artifactType") or document["config"]["mediaType"]
                more = {"artifactType": kind, "annotations": document.get("annotations", {})}
                found.append({**entry, **more})
        return found

    def tagged(self, repository: str, tag: str) -> dict[str, Any]:
        """The document under a tag."""
        found = self.repository(repository)
        document: dict[str, Any] = json.loads(found.manifests[found.tags[tag]][0])
        return document

    def _answer(self, seen: Seen) -> Answer:
        for path, answer in (
            (_UPLOADS, self._upload),
            (_PUT, self._put_manifest),
            (_REFERRERS, self._referrers),
        ):
            match = path.fullmatch(seen.path)
            if match is None or (path is _PUT and seen.method != "PUT"):
                continue
            refusal = self.gate.check(seen) if self.gate else None
            return refusal or answer(seen, match)
        return super()._answer(seen)

    def _upload(self, seen: Seen, match: re.Match[str]) -> Answer:
        repository, upload = match["repository"], match["upload"]
        if seen.method == "POST":
            return self._begin(seen, repository)
        if upload not in self._uploads:
            return error(404, "BLOB_UPLOAD_UNKNOWN")
        held = self._uploads[upload]
        if seen.method == "PATCH":
            if not self.pieces:
                return error(405, "UNSUPPORTED")
            if seen.headers["content-range"] != f"{len(held)}-{len(held) + len(seen.body) - 1}":
                return error(416, "RANGE_INVALID")
            self._uploads[upload] = held + seen.body
            return self._at(repository, upload)
        if len(seen.body) > self.whole_bytes:
            return error(413, "SIZE_INVALID")
        data = held + seen.body
        if str(sha256(data)) != seen.query["digest"]:
            return error(400, "DIGEST_INVALID")
        del self._uploads[upload]
        self.add_blob(repository, data)
        return Answer(201)

    def _begin(self, seen: Seen, repository: str) -> Answer:
        mounted = self.repositories.get(seen.query.get("from", ""), Repository())
        data = mounted.blobs.get(seen.query.get("mount", ""))
        if data is not None:
            self.add_blob(repository, data)
            return Answer(201)
        upload = str(len(self.seen))
        self._uploads[upload] = b""
        return self._at(repository, upload)

    def _at(self, repository: str, upload: str) -> Answer:
        return Answer(202, [("Location", f"/v2/{repository}/blobs/uploads/{upload}?state=a%2Fb")])

    def _put_manifest(self, seen: Seen, match: re.Match[str]) -> Answer:
        tag = None if ":" in match["name"] else match["name"]
        kind = seen.headers["content-type"]
        digest = self.add_manifest(match["repository"], seen.body, kind, tag)
        document = json.loads(seen.body)
        known = {str(name) for name in self.repository(match["repository"]).blobs}
        missing = [e["digest"] for e in document.get("layers", []) if e["digest"] not in known]
        if missing or (tag is None and match["name"] != str(digest)):
            return error(400, "MANIFEST_BLOB_UNKNOWN")
        headers = [("Docker-Content-Digest", str(digest))]
        if self.api and "subject" in document:
            headers.append(("OCI-Subject", document["subject"]["digest"]))
        return Answer(201, headers)

    def _referrers(self, seen: Seen, match: re.Match[str]) -> Answer:
        if not self.api:
            return error(404, "NAME_UNKNOWN")
        found = self.referrers(match["repository"], match["digest"])
        headers = [("Content-Type", OCI_INDEX)]
        wanted = seen.query.get("artifactType")
        if self.filters and wanted:
            found = [entry for entry in found if entry["artifactType"] == wanted]
            headers.append(("OCI-Filters-Applied", "artifactType"))
        start = int(seen.query.get("from", "0"))
        end = start + self.page_entries
        if end < len(found):
            query = f"artifactType={wanted}&from={end}"
            headers.append(("Link", f'<{seen.path}?{query}>; rel="next"'))
        index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": found[start:end]}
        return Answer(200, headers, json.dumps(index).encode())
