"""Proxies are chosen as Go programs choose them, and spoken to on the wire."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshotter.content import BlobRef, Extent
from snapshotter.errors import ConfigError, UnavailableError
from snapshotter.oci.assembly import RegistrySettings, open_registry
from snapshotter.oci.proxies import ProxySettings
from tests.fakes.certificates import Authority
from tests.fakes.clients import NOWHERE, QUICK, read, registry_client
from tests.fakes.http_server import Answer, Seen
from tests.fakes.proxy import TunnelProxy
from tests.fakes.registry import FakeRegistry, serve, sha256
from tests.fakes.skipping_clock import SkippingClock

PROXY = "http://proxy.example:3128"


@pytest.mark.parametrize(
    ("url", "no_proxy", "proxied"),
    [
        ("https://registry.example/v2/", "", True),
        ("http://registry.example/v2/", "", True),
        ("https://localhost:5000/", "", False),
        ("http://127.0.0.1:5000/", "", False),
        ("http://[::1]:5000/", "", False),
        ("https://registry.example/", "*", False),
        ("https://registry.example/", "registry.example", False),
        ("https://eu.registry.example/", "registry.example", False),
        ("https://noregistry.example/", "registry.example", True),
        ("https://registry.example/", ".registry.example", True),
        ("https://eu.registry.example/", " other , .registry.example", False),
        ("https://eu.registry.example/", "*.registry.example", False),
        ("https://registry.example:5000/", "registry.example:5000", False),
        ("https://registry.example:5001/", "registry.example:5000", True),
        ("https://registry.example/", "registry.example:443", False),
        ("https://10.1.2.3/", "10.0.0.0/8", False),
        ("https://11.1.2.3/", "10.0.0.0/8", True),
        ("https://10.1.2.3/", "10.1.2.3", False),
        ("https://[fd00::1]/", "fd00::/8", False),
        ("https://[fd00::1]:5000/", "[fd00::1]:5000", False),
        ("https://REGISTRY.example/", "registry.EXAMPLE", False),
    ],
)
def test_no_proxy_means_what_it_means_to_go(url: str, no_proxy: str, proxied: bool) -> None:
    environment = {"HTTP_PROXY": PROXY, "https_proxy": PROXY, "NO_PROXY": no_proxy}
    settings = ProxySettings.from_environment(environment)
    assert settings.proxy_of(url) == (PROXY if proxied else None)


def test_each_scheme_has_its_own_proxy() -> None:
    settings = ProxySettings.from_environment({"HTTP_PROXY": "one:1", "http_proxy": "two:2"})
    assert settings.proxy_of("http://a.example") == "http://one:1"
    assert settings.proxy_of("https://a.example") is None
    assert ProxySettings.from_environment({}).proxy_of("http://a.example") is None


@pytest.mark.parametrize("url", ["socks5://p:1080", "http://", "http://p:port"])
def test_a_proxy_that_can_t_be_used_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match="HTTPS_PROXY"):
        ProxySettings.from_environment({"HTTPS_PROXY": url})


def test_a_proxy_s_password_does_not_show() -> None:
    settings = ProxySettings.from_environment({"HTTPS_PROXY": "http://u:s3cr3t@p:1"})
    assert "s3cr3t" not in repr(settings)


class Proxy(FakeRegistry):
    """A forward proxy that answers for every server itself."""

    data = b"0123456789"

    def _answer(self, seen: Seen) -> Answer:
        return serve(seen, self.data)


async def test_requests_go_through_the_proxy_with_its_password() -> None:
    async with Proxy() as proxy:
        environment = {"HTTP_PROXY": f"http://me:s3cr3t@{proxy.authority}"}
        settings = RegistrySettings(
            certs_dirs=(NOWHERE,), plain_http=("r.test",), docker_configs=(), limits=QUICK
        )
        client = open_registry(settings, SkippingClock(), environment=environment)
        blob = BlobRef("r.test/app", sha256(Proxy.data), 10)
        try:
            assert await read(client, blob, Extent(2, 3)) == b"234"
            await proxy.stop()
            with pytest.raises(UnavailableError) as caught:
                await read(client, blob, Extent(2, 3))
        finally:
            await client.close()
        assert proxy.seen[0].target.startswith("http://r.test/v2/app/blobs/sha256:")
        assert proxy.seen[0].headers["proxy-authorization"].startswith("Basic ")
        assert "s3cr3t" not in str(caught.value)


async def test_tls_goes_through_a_tunnel_that_the_proxy_makes(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with (
        FakeRegistry(authority.server_context()) as registry,
        TunnelProxy(registry.port) as proxy,
    ):
        digest = registry.add_blob("app", Proxy.data)
        folder = tmp_path / "registry.test"
        folder.mkdir()
        (folder / "ca.crt").write_bytes(authority.path.read_bytes())
        environment = {"https_proxy": f"http://me:s3cr3t@127.0.0.1:{proxy.port}"}
        async with registry_client(certs=tmp_path, environment=environment) as client:
            blob = BlobRef("registry.test/app", digest, 10)
            assert await read(client, blob, Extent(2, 3)) == b"234"
        assert proxy.asked[0].startswith("CONNECT registry.test:443 ")
        assert "proxy-authorization: basic" in proxy.asked[0].lower()
        assert all("proxy-authorization" not in seen.headers for seen in registry.seen)
