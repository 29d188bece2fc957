"""Debian's docker-registry on a unix socket, and the relay that puts it on the shaped link.

A unix socket is not shaped, so every byte passes the link once: from the relay to the client. The
storage is kept between beds: an image that was pushed once is there in the next run.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlencode, urlsplit

from bench.bed.link import Link
from bench.bed.process import BedError, Server
from bench.bed.relay import Counters

PORT = 5000
MANIFESTS = ("manifest", "index")
HOST = f"localhost:{PORT}"
ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = """\
version: 0.1
log: {{level: info, formatter: json}}
storage:
  filesystem: {{rootdirectory: {storage}}}
  cache: {{blobdescriptor: inmemory}}
  delete: {{enabled: true}}
http: {{net: unix, addr: {socket}, host: "http://localhost:5000", relativeurls: true}}
"""


class UnixConnection(http.client.HTTPConnection):
    """HTTP/1.1 over a unix socket."""

    def __init__(self, path: Path, timeout_s: float = 60.0) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Registry:
    """docker-registry with its relay; ``start`` returns when it answers on the link."""

    def __init__(self, directory: Path, storage: Path, link: Link) -> None:
        self.directory = directory
        self.storage = storage
        self.link = link
        self.socket = directory / "registry.sock"
        self._servers: list[Server] = []
        self._counters: Counters | None = None

    def start(self) -> None:
        self.storage.mkdir(parents=True, exist_ok=True)
        configuration = self.directory / "registry.yml"
        configuration.write_text(
            CONFIGURATION.format(storage=self.storage, socket=self.socket), encoding="utf-8"
        )
        registry = Server(
            "docker-registry",
            ["docker-registry", "serve", configuration],
            log=self.directory / "registry.log",
            env={"OTEL_TRACES_EXPORTER": "none"},
        )
        self._servers.append(registry)
        registry.wait_until(self._answers)
        counters = self.directory / "relay.counters"
        self._counters = Counters(counters)
        words = [*self.link.enter(), sys.executable, "-m", "bench.bed.relay"]
        words += ["--listen", f"127.0.0.1:{PORT}", "--target", str(self.socket)]
        words += ["--delay-ms", str(self.link.shape.delay_ms), "--counters", str(counters)]
        relay = Server("relay", words, log=self.directory / "relay.log", cwd=ROOT)
        self._servers.append(relay)
        relay.wait_until(self._is_listening)

    def _answers(self) -> bool:
        try:
            connection = UnixConnection(self.socket, timeout_s=2.0)
            connection.request("GET", "/v2/")
            return connection.getresponse().status == 200
        except OSError:
            return False

    def _is_listening(self) -> bool:
        table = Path(f"/proc/{self._servers[-1].pid}/net/tcp")
        # A row: number, local address, remote address, state (0A = listening).
        rows = [row.split() for row in table.read_text().splitlines()[1:]]
        return any(row[1].endswith(f":{PORT:04X}") and row[3] == "0A" for row in rows)

    def stop(self) -> None:
        while self._servers:
            self._servers.pop().stop()

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Connections are taken and nothing is answered: what there is goes on afterwards."""
        for server in self._servers:
            os.kill(server.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for server in self._servers:
                os.kill(server.pid, signal.SIGCONT)

    def has(self, repository: str, tag: str) -> bool:
        """Whether there is such a tag; the storage outlives the bed."""
        connection = UnixConnection(self.socket)
        accept = ", ".join(f"application/vnd.oci.image.{kind}.v1+json" for kind in MANIFESTS)
        path = f"/v2/{repository}/manifests/{tag}"
        connection.request("HEAD", path, headers={"Accept": accept})
        return connection.getresponse().status == 200

    def sent_bytes(self) -> int:
        """Bytes that the registry sent to clients over the link, with HTTP's own headers."""
        if self._counters is None:
            raise BedError("the registry is not running")
        return self._counters.read()[2]

    def requests(self) -> int:
        """Requests answered since the registry started, by its own log."""
        log = (self.directory / "registry.log").read_text(errors="replace")
        return log.count('"http.response.status"')


class Pusher:
    """Pushes blobs and manifests byte for byte into one repository, past the link."""

    def __init__(self, registry: Registry, repository: str) -> None:
        self._connection = UnixConnection(registry.socket, timeout_s=300.0)
        self._repository = repository

    def _ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, str, bytes]:
        self._connection.request(method, path, body, headers or {})  # type: ignore[arg-type]
        answer = self._connection.getresponse()
        return answer.status, answer.headers.get("Location", ""), answer.read()

    def blob(self, digest: str, path: Path) -> None:
        """Push one blob from a file, unless it is there already."""
        with path.open("rb") as file:
            self._blob(digest, file, path.stat().st_size)

    def content(self, digest: str, content: bytes) -> None:
        """Push one blob, unless it is there already."""
        self._blob(digest, content, len(content))

    def delete_blob(self, digest: str) -> None:
        """Let the registry forget a blob, as a collector there would."""
        status, _, said = self._ask("DELETE", f"/v2/{self._repository}/blobs/{digest}")
        if status != 202:
            raise BedError(f"{self._repository}@{digest}: not deleted ({status}): {said[:300]!r}")

    def _blob(self, digest: str, content: BinaryIO | bytes, length_bytes: int) -> None:
        status, _, _ = self._ask("HEAD", f"/v2/{self._repository}/blobs/{digest}")
        if status == 200:
            return
        status, location, said = self._ask("POST", f"/v2/{self._repository}/blobs/uploads/")
        if status != 202:
            raise BedError(f"{self._repository}: no upload ({status}): {said[:300]!r}")
        parts = urlsplit(location)
        target = f"{parts.path}?{parts.query}&{urlencode({'digest': digest})}"
        headers = {"Content-Length": str(length_bytes), "Content-Type": "application/octet-stream"}
        status, _, said = self._ask("PUT", target, content, headers)
        if status != 201:
            raise BedError(f"{self._repository}@{digest}: not taken ({status}): {said[:300]!r}")

    def manifest(self, tag: str, content: bytes) -> None:
        """Push a manifest or an index under ``tag``; its own mediaType says what it is."""
        headers = {"Content-Type": json.loads(content)["mediaType"]}
        path = f"/v2/{self._repository}/manifests/{tag}"
        status, _, said = self._ask("PUT", path, content, headers)
        if status != 201:
            raise BedError(f"{self._repository}:{tag}: not taken ({status}): {said[:300]!r}")
