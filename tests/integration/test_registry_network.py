"""The whole daemon and the way to a registry: TLS or not, and proxies of the environment.

Addresses of a network of its own stand for other machines: loopback ones are spoken to without TLS
and are never proxied.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from bench.bed.process import run
from tests.fakes.certificates import Authority
from tests.fakes.gates import basic
from tests.fakes.http2_wire import speak_http2
from tests.fakes.proxy import TunnelProxy
from tests.integration.registry_scene import Scene, noisy, of_many_files, read_all, scene_in
from tests.node import words_of

pytestmark = [pytest.mark.root, pytest.mark.containerd]

PROXIED = "10.98.0.1:5011"
PLAIN = "10.98.0.2:5012"
TLS_ONLY = "10.98.0.3:5013"
NAMED = "registry.test"
"""No name server knows it: only a proxy can lead there."""
FORWARD, TUNNEL = 5098, 5099
"""Ports of the proxies."""


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certs.d")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, certs: Path) -> Iterator[Scene]:
    more = f'hosts_dir = "{certs}"\nplain_http = ["{PROXIED}", "{PLAIN}"]\n'
    environment = {
        "HTTP_PROXY": f"http://me:word@127.0.0.1:{FORWARD}",
        "HTTPS_PROXY": f"127.0.0.1:{TUNNEL}",
        "NO_PROXY": "10.98.0.2/31",
    }
    directory = tmp_path_factory.mktemp("network")
    with scene_in(directory, lambda _: more, environment=environment) as made:
        for authority in (PLAIN, TLS_ONLY):
            address = authority.partition(":")[0]
            run(["ip", "-n", made.node.bed.name, "addr", "add", f"{address}/32", "dev", "lo"])
        yield made


def split(authority: str) -> tuple[str, int]:
    address, _, port = authority.partition(":")
    return address, int(port)


def test_plain_http_to_another_machine_is_refused_and_the_way_out_is_told(scene: Scene) -> None:
    with scene.registries.another(*split(TLS_ONLY)) as registry:
        reference = scene.add(noisy("no tls"), registry)
        with pytest.raises(grpc.RpcError) as refused:
            scene.node.pull(reference)
        said = words_of(refused.value)
        assert f"{TLS_ONLY}: it does not speak TLS" in said
        assert "registry.plain_http" in said
        assert registry.seen == [], "not one request may go there in the clear"


def test_plain_http_is_spoken_to_a_machine_that_the_configuration_names(scene: Scene) -> None:
    with scene.registries.another(*split(PLAIN)) as registry:
        case = noisy("plain")
        scene.lazily(case, registry)
        with scene.node.mounted(case.chain_id) as root:
            assert read_all(scene, case, root) == ["", ""]
        assert registry.seen


def test_plain_http_is_spoken_to_a_host_that_hosts_toml_names(scene: Scene, certs: Path) -> None:
    with scene.registries.another("10.98.0.3") as registry:
        folder = certs / registry.authority
        folder.mkdir()
        (folder / "hosts.toml").write_text(f'server = "{registry.url}"\n')
        case = noisy("plain by hosts.toml")
        scene.lazily(case, registry)
        with scene.node.mounted(case.chain_id) as root:
            assert read_all(scene, case, root) == ["", ""]


def test_requests_go_through_the_proxy_of_the_environment(scene: Scene) -> None:
    with scene.registries.another("127.0.0.1", FORWARD) as proxy:
        case = noisy("proxied")
        scene.add(case, proxy)
        scene.pull_index(f"{PROXIED}/{case.repository}:1", case)
        with scene.node.mounted(case.chain_id) as root:
            assert read_all(scene, case, root) == ["", ""]
        assert proxy.asked("/blobs/")
        for seen in proxy.seen:
            assert seen.target.startswith(f"http://{PROXIED}/v2/")
            assert seen.headers["proxy-authorization"] == basic("me", "word")


def test_what_no_proxy_names_is_gone_to_directly(scene: Scene) -> None:
    with (
        scene.registries.another("127.0.0.1", FORWARD) as proxy,
        scene.registries.another(*split(PLAIN)) as registry,
    ):
        case = noisy("not proxied")
        scene.lazily(case, registry)
        with scene.node.mounted(case.chain_id) as root:
            assert read_all(scene, case, root) == ["", ""]
        assert registry.asked("/blobs/")
        assert proxy.seen == []


def test_tls_goes_through_a_tunnel_that_the_proxy_makes(
    scene: Scene, certs: Path, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    folder = certs / NAMED
    folder.mkdir()
    (folder / "ca.crt").write_bytes(authority.path.read_bytes())
    with scene.registries.another(tls=authority.server_context()) as registry:
        proxy = TunnelProxy(registry.port, TUNNEL)
        scene.registries.do(proxy.__aenter__())
        try:
            case = noisy("tunnelled")
            scene.add(case, registry)
            scene.pull_index(f"{NAMED}/{case.repository}:1", case)
            with scene.node.mounted(case.chain_id) as root:
                assert read_all(scene, case, root) == ["", ""]
        finally:
            scene.registries.do(proxy.__aexit__())
        assert registry.asked("/blobs/")
        assert all(head.startswith(f"CONNECT {NAMED}:443 ") for head in proxy.asked)


def test_small_reads_go_over_http2_where_it_is_spoken(
    scene: Scene, certs: Path, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    context = authority.server_context()
    with scene.registries.another(tls=context) as registry:
        speak_http2(registry, context)
        folder = certs / registry.authority
        folder.mkdir()
        hosts = f'server = "{registry.url}"\nca = "{authority.path}"\n'
        (folder / "hosts.toml").write_text(hosts)
        rounds = 0
        while rounds < 10 and not [seen for seen in registry.seen if seen.http2]:
            rounds += 1
            case = of_many_files(f"over http2, round {rounds}")
            scene.lazily(case, registry)
            with scene.node.mounted(case.chain_id) as root:
                assert set(read_all(scene, case, root)) == {""}
        assert [seen for seen in registry.seen if seen.http2]
