"""Registries that others wrote, for a test: Debian's docker-registry, which knows no referrers, and
go-containerregistry's, which does. Each on a port of its own, with nothing in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from bench.bed.gobin import BUILD_S, CACHE, go
from bench.bed.process import run
from tests.cases.images import OCI, ImageCase, digest
from tests.patience import until

MODULE = Path(__file__).parent / "tools" / "referrers-registry"
_CONFIGURATION = """
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {folder}}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


@contextlib.contextmanager
def docker_registry(folder: Path) -> Iterator[str]:
    """``host:port`` of one whose referrers are listed under a tag."""
    port = _free_port()
    configuration = folder / "registry.yml"
    configuration.write_text(_CONFIGURATION.format(folder=folder / "data", port=port))
    with subprocess.Popen(
        ["docker-registry", "serve", configuration],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OTEL_TRACES_EXPORTER": "none"},
    ) as server:
        try:
            assert until(lambda: _answers(port))
            yield f"127.0.0.1:{port}"
        finally:
            server.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextlib.contextmanager
def referrers_registry(folder: Path) -> Iterator[str]:
    """``host:port`` of one that knows referrers."""
    with subprocess.Popen([program()], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip()
        finally:
            server.kill()


def program() -> Path:
    """Built on the first call (seconds), kept in the cache folder under its source's digest."""
    sources = [MODULE / name for name in ("main.go", "go.mod", "go.sum")]
    name = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    program = CACHE / "bin" / f"referrers-registry-{name}"
    program.parent.mkdir(parents=True, exist_ok=True)
    with (CACHE / "bin.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not program.exists():
            part = program.with_suffix(".part")
            home = os.environ.get("HOME") or "/root"
            words = [go(), "build", "-C", str(MODULE), "-buildvcs=false", "-o", str(part), "."]
            run(words, timeout_s=BUILD_S, env={"HOME": home})
            part.rename(program)
    return program


def push(authority: str, case: ImageCase) -> str:
    """Put an image there with nothing but the standard library; its reference."""
    base = f"http://{authority}/v2/{case.repository}"
    for content in case.contents:
        place = ask("POST", f"{base}/blobs/uploads/", b"").headers["Location"]
        if place.startswith("/"):
            place = f"http://{authority}{place}"
        mark = "&" if "?" in place else "?"
        ask("PUT", f"{place}{mark}digest={digest(content)}", content)
    for number, document in enumerate(case.documents):
        last = number == len(case.documents) - 1
        kind = f"{OCI}.index.v1+json" if b'"manifests"' in document else f"{OCI}.manifest.v1+json"
        ask("PUT", f"{base}/manifests/{'1' if last else digest(document)}", document, kind)
    return f"{authority}/{case.repository}:1"


class Said:
    """An answer: status, headers, body."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body


def ask(method: str, url: str, body: bytes | None = None, kind: str = "") -> Said:
    """One request; an error status is an answer too."""
    request = urllib.request.Request(url, data=body, method=method)
    request.add_header("Content-Type", kind or "application/octet-stream")
    request.add_header("Accept", f"{OCI}.index.v1+json, {OCI}.manifest.v1+json")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return Said(answer.status, dict(answer.headers), answer.read())
    except urllib.error.HTTPError as error:
        return Said(error.code, dict(error.headers), error.read())
