"""The client and TLS as registries have it: docker-registry behind nginx.

Each fault has to be told with its way out, and each file is taken up while the client runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvloop

from bench.bed.process import run
from snapshotter.content import BlobRef, Extent
from snapshotter.errors import EmberError
from snapshotter.oci.limits import TransportLimits
from snapshotter.oci.reference import parse_reference
from snapshotter.oci.registry import RegistryClient
from tests.fakes.certificates import Authority
from tests.fakes.clients import read, registry_client, stream
from tests.fakes.registry import sha256
from tests.fakes.skipping_clock import SkippingClock
from tests.integration.nginx import Nginx, nginx_before
from tests.integration.test_registry_real import (
    AMD64,
    LAYERS,
    free_port,
    is_up,
    push_app,
    real_registry,
)
from tests.patience import until

LIMITS = TransportLimits(connect_s=5, idle_s=5, connections_per_host=4)
DATA = LAYERS[0]


@dataclass
class Scene:
    """The registry behind nginx; ``certs`` is where hosts.toml files go."""

    nginx: Nginx
    ours: Authority
    certs: Path
    clock: SkippingClock

    @property
    def blob(self) -> BlobRef:
        return BlobRef(f"{self.nginx.authority}/team/app", sha256(DATA), len(DATA))

    def hosts_toml(self, *lines: str) -> None:
        folder = self.certs / self.nginx.authority
        folder.mkdir(parents=True, exist_ok=True)
        text = "\n".join([f'server = "https://{self.nginx.authority}"', *lines, ""])
        (folder / "hosts.toml").write_text(text)
        self.clock.now_s += 15  # it is looked at again every ten seconds

    async def bring(self, client: RegistryClient) -> None:
        assert await read(client, self.blob, Extent(7, 100)) == DATA[7:107]

    async def refusal(self, client: RegistryClient) -> str:
        with pytest.raises(EmberError) as caught:
            await read(client, self.blob, Extent(7, 100))
        return str(caught.value)


def authority_in(folder: Path) -> Authority:
    folder.mkdir()
    return Authority(folder)


@asynccontextmanager
async def scene(
    folder: Path, *, hosts: tuple[str, ...] = ("127.0.0.1",), days: int = 30, more: str = ""
) -> AsyncIterator[Scene]:
    ours = authority_in(folder / "ours")
    pair = ours.issue("server", hosts, days=days)
    async with (
        asyncio.timeout(60),
        real_registry(folder) as registry,
        nginx_before(registry.authority, folder / "nginx", pair, more) as nginx,
    ):
        await push_app(registry)
        made = Scene(nginx, ours, folder / "certs.d", SkippingClock())
        made.hosts_toml()
        yield made


@asynccontextmanager
async def client_of(at: Scene) -> AsyncIterator[RegistryClient]:
    async with registry_client(certs=at.certs, limits=LIMITS, clock=at.clock) as client:
        yield client


def test_the_daemon_s_own_loop_speaks_http2_where_a_body_is_small(tmp_path: Path) -> None:
    spoken = uvloop.run(read_small_and_large(tmp_path))
    assert [line for line in spoken if line.startswith("HTTP/2.0 206 ")]
    assert [line for line in spoken if line.startswith("HTTP/1.1 206 ") and "1-400000" in line]
    whole = [line for line in spoken if line.split()[1] == "200" and "/blobs/" in line]
    assert [line.split()[0] for line in whole if line.endswith(" -")].count("HTTP/1.1") >= 1


async def read_small_and_large(folder: Path) -> list[str]:
    """Resolve, read and stream; what nginx says that it spoke."""
    async with scene(folder) as at, client_of(at) as client:
        at.hosts_toml(f'ca = "{at.ours.path}"')
        image = await client.resolve(parse_reference(f"{at.nginx.authority}/team/app:v1"), AMD64)
        assert len(image.layers) == len(LAYERS)
        extents = [Extent(n * 1000, 1000) for n in range(40)]
        while not [line for line in at.nginx.spoken() if line.startswith("HTTP/2.0 206 ")]:
            found = await asyncio.gather(*(read(client, at.blob, extent) for extent in extents))
            assert b"".join(found) == DATA[:40_000]
        large = Extent(1, 400_000)
        assert await read(client, at.blob, large) == DATA[1:400_001]
        assert await stream(client, at.blob) == DATA
        return at.nginx.spoken()


async def test_more_requests_than_nginx_lets_a_connection_have_are_all_answered(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path, more="keepalive_requests 7;") as at, client_of(at) as client:
        at.hosts_toml(f'ca = "{at.ours.path}"')
        for _ in range(8):
            extents = [Extent(n * 1000, 1000) for n in range(24)]
            found = await asyncio.gather(*(read(client, at.blob, extent) for extent in extents))
            assert b"".join(found) == DATA[:24_000]
        assert [line for line in at.nginx.spoken() if line.startswith("HTTP/2.0 206 ")]


async def test_an_authority_that_only_the_system_trusts_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(tmp_path) as at:
        monkeypatch.setenv("SSL_CERT_FILE", str(at.ours.path))
        async with client_of(at) as client:
            await at.bring(client)
        assert "HTTP/1.1 206 GET" in at.nginx.log("access")


async def test_so_is_one_in_the_system_s_folder_and_it_may_come_there_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted = tmp_path / "trusted"
    trusted.mkdir()
    monkeypatch.setenv("SSL_CERT_DIR", str(trusted))
    async with scene(tmp_path) as at, client_of(at) as client:
        assert "is not trusted" in await at.refusal(client)
        (trusted / at.ours.path.name).write_bytes(at.ours.path.read_bytes())
        await asyncio.to_thread(run, ["openssl", "rehash", trusted])
        await at.bring(client)


async def test_an_authority_that_nobody_trusts_is_told_with_both_ways_out(tmp_path: Path) -> None:
    async with scene(tmp_path) as at, client_of(at) as client:
        said = await at.refusal(client)
        assert "the certificate of 127.0.0.1 is not trusted (unable to get local issuer" in said
        assert "'ca' in its hosts.toml or the system's trust can name who signed it" in said
        at.hosts_toml("skip_verify = true")
        await at.bring(client)


async def test_an_expired_certificate_is_told_and_taken_once_it_is_renewed(tmp_path: Path) -> None:
    async with scene(tmp_path, days=-2) as at, client_of(at) as client:
        at.hosts_toml(f'ca = "{at.ours.path}"')
        said = await at.refusal(client)
        assert "(certificate has expired); it has to be renewed there, if this machine's" in said
        at.nginx.configure(at.ours.issue("renewed"))
        at.nginx.reload()
        await at.bring(client)


async def test_a_certificate_for_another_name_is_told_with_that_name(tmp_path: Path) -> None:
    async with scene(tmp_path, hosts=("other.test",)) as at, client_of(at) as client:
        at.hosts_toml(f'ca = "{at.ours.path}"')
        said = await at.refusal(client)
        assert "certificate is not valid for '127.0.0.1'" in said
        assert "it has to be called by a name that its certificate bears" in said


async def test_an_authority_that_is_replaced_is_taken_up_at_once(tmp_path: Path) -> None:
    theirs = authority_in(tmp_path / "theirs")
    named = tmp_path / "ca.pem"
    named.write_bytes(theirs.path.read_bytes())
    async with scene(tmp_path) as at, client_of(at) as client:
        at.hosts_toml(f'ca = "{named}"')
        assert "is not trusted" in await at.refusal(client)
        named.write_bytes(at.ours.path.read_bytes())
        await at.bring(client)
        named.write_bytes(theirs.path.read_bytes())
        assert "is not trusted" in await at.refusal(client), "a kept connection is no trust"


async def test_a_ca_that_is_none_is_told_by_its_path(tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    async with scene(tmp_path) as at, client_of(at) as client:
        at.hosts_toml(f'ca = "{broken}"')
        assert f"CA {broken}: No such file or directory" in await at.refusal(client)
        broken.write_text("no PEM")
        assert f"CA {broken}: no certificate in PEM" in await at.refusal(client)


async def test_a_client_s_certificate_is_shown_and_may_be_renewed(tmp_path: Path) -> None:
    clients = authority_in(tmp_path / "clients")
    more = f"ssl_client_certificate {clients.path}; ssl_verify_client on;"
    async with scene(tmp_path, more=more) as at, client_of(at) as client:
        ca = f'ca = "{at.ours.path}"'
        at.hosts_toml(ca)
        assert "'client' in hosts.toml names one" in await at.refusal(client)
        pair = [tmp_path / "client.cert", tmp_path / "client.key"]
        lines = f'client = [["{pair[0]}", "{pair[1]}"]]'
        at.hosts_toml(ca, lines)
        assert f"client certificate {pair[0]} with key {pair[1]}: No such file" in (
            await at.refusal(client)
        )
        for days, is_good in ((-1, False), (30, True)):
            issued = clients.issue("ember", days=days)
            for path, made in zip(pair, issued, strict=True):
                path.write_bytes(made.read_bytes())
            if is_good:
                await at.bring(client)
            else:
                assert "'client' in hosts.toml names one" in await at.refusal(client)


async def test_a_handshake_that_wants_a_client_s_certificate_says_so(tmp_path: Path) -> None:
    ours, port = Authority(tmp_path), free_port()
    certificate, key = ours.issue("server")
    words = ["-accept", str(port), "-cert", str(certificate), "-key", str(key)]
    words += ["-Verify", "1", "-verify_return_error", "-www"]
    quiet = asyncio.subprocess.DEVNULL
    server = await asyncio.create_subprocess_exec(
        "openssl", "s_server", *words, stdout=quiet, stderr=quiet
    )
    try:
        assert await asyncio.to_thread(until, lambda: is_up(port), 10)
        folder = tmp_path / f"127.0.0.1:{port}"
        folder.mkdir()
        toml = f'server = "https://127.0.0.1:{port}"\nca = "{ours.path}"\n'
        (folder / "hosts.toml").write_text(toml)
        async with registry_client(certs=tmp_path, limits=LIMITS) as client:
            with pytest.raises(EmberError) as caught:
                await client.resolve(parse_reference(f"127.0.0.1:{port}/team/app:v1"), AMD64)
        assert "'client' in hosts.toml names a certificate for it" in str(caught.value)
    finally:
        server.terminate()
        await server.wait()
