"""What a user is told of a connection that could not be made: place and reason, nothing else."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from snapshotter.errors import UnavailableError
from snapshotter.oci.exchange import Request
from snapshotter.oci.hosts import default_host
from snapshotter.oci.transport import HttpTransport
from tests.fakes.certificates import Authority
from tests.fakes.http_server import Answer, HttpServer, Seen

INTERNAL = ("object at", "ssl:", "Context", "_ssl.c", "ClientConnector")


class Silent(HttpServer):
    async def handle(self, seen: Seen) -> Answer:
        return Answer()


async def refused(url: str) -> str:
    request = Request(url, default_host("registry.example", plain_http=False), "r", "r")
    transport = HttpTransport()
    try:
        with pytest.raises(UnavailableError) as caught:
            await transport.send(request)
    finally:
        await transport.close()
    said = str(caught.value)
    assert said.startswith(f"{url}: ")
    assert not [word for word in INTERNAL if word in said], said
    return said


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_refused_connection_is_named_by_place_and_reason(scheme: str) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        port = unheard.getsockname()[1]
        said = await refused(f"{scheme}://127.0.0.1:{port}/v2/")
    assert f"cannot connect to 127.0.0.1:{port}: Connection refused" in said


async def test_a_name_that_nobody_knows_is_said_to_be_unknown() -> None:
    said = await refused("https://registry.invalid/v2/")
    assert "cannot connect to registry.invalid:443: " in said


async def test_a_certificate_that_nobody_vouches_for_is_named(tmp_path: Path) -> None:
    async with Silent(Authority(tmp_path).server_context()) as server:
        said = await refused(f"https://127.0.0.1:{server.port}/v2/")
    assert "the certificate of 127.0.0.1 is not trusted (" in said


async def test_a_server_without_tls_is_told_from_one_that_is_down() -> None:
    async with Silent() as server:
        said = await refused(f"https://127.0.0.1:{server.port}/v2/")
    assert "does not speak TLS" in said
    assert "registry.plain_http" in said
