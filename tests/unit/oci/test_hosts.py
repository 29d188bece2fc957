"""hosts.toml is read as containerd reads it, and what can't be read is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshotter.content import BlobRef, Digest, Extent
from snapshotter.errors import ConfigError, UnavailableError
from snapshotter.oci.duration import parse_duration_s
from snapshotter.oci.hostbook import HostBook
from snapshotter.oci.hosts import Host, TlsFiles, is_local, load_hosts
from tests.fakes.certificates import Authority
from tests.fakes.clients import read, registry_client, registry_with
from tests.fakes.http_server import Seen
from tests.fakes.registry import FakeRegistry
from tests.fakes.skipping_clock import SkippingClock

REGISTRY = "registry.example:5000"


def write(root: Path, text: str, folder: str = REGISTRY) -> Path:
    (root / folder).mkdir(parents=True, exist_ok=True)
    path = root / folder / "hosts.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("registry", "base"),
    [
        ("docker.io", "https://registry-1.docker.io/v2"),
        ("quay.io", "https://quay.io/v2"),
        (REGISTRY, f"https://{REGISTRY}/v2"),
        ("localhost:5000", "http://localhost:5000/v2"),
        ("localhost", "http://localhost/v2"),
        ("localhost:443", "https://localhost:443/v2"),
        ("127.0.0.1:5000", "http://127.0.0.1:5000/v2"),
        ("127.9.9.9:5000", "http://127.9.9.9:5000/v2"),
        ("[::1]:5000", "http://[::1]:5000/v2"),
        ("128.0.0.1:5000", "https://128.0.0.1:5000/v2"),
        ("localhost.example", "https://localhost.example/v2"),
    ],
)
def test_without_a_file_the_registry_is_where_its_name_says(registry: str, base: str) -> None:
    (host,) = load_hosts([], registry)
    assert host.base == base
    assert host.is_server
    assert host.namespace is None


def test_plain_http_is_for_this_machine_and_for_whom_it_was_allowed() -> None:
    assert load_hosts([], REGISTRY, plain_http=True)[0].is_plain
    assert not load_hosts([], REGISTRY)[0].is_plain
    assert is_local("127.0.0.1:1")
    assert not is_local("10.0.0.1")
    book = HostBook(SkippingClock(), plain_http=[REGISTRY])
    assert book.hosts(REGISTRY, "pull")[0].is_plain
    assert not book.hosts("other.example", "pull")[0].is_plain


def test_hosts_come_in_the_file_s_order_and_the_server_last(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        server = "https://upstream.example"
        ca = "own.pem"
        [host."https://z.example"]
          capabilities = ["pull"]
          [host."https://z.example".header]
            X-One = "1"
            X-Two = ["a", "b"]
        [host."http://a.example:8080/cache/v2/"]
          capabilities = ["Pull", "resolve"]
          skip_verify = true
          dial_timeout = "1500ms"
          client = [["c.pem", "c.key"], "both.pem"]
          ca = ["one.pem", "/two.pem"]
        [host."m.example/mirror"]
        [host."https://o.example/exact"]
          override_path = true
        """,
    )
    hosts = load_hosts([tmp_path], REGISTRY)
    folder = tmp_path / REGISTRY
    assert [host.base for host in hosts] == [
        "https://z.example/v2",
        "http://a.example:8080/cache/v2",
        "https://m.example/mirror/v2",
        "https://o.example/exact",
        "https://upstream.example/v2",
    ]
    assert [host.namespace for host in hosts] == [REGISTRY] * 5
    assert [host.is_server for host in hosts] == [False, False, False, False, True]
    assert hosts[0].capabilities == {"pull"}
    assert hosts[0].headers == (("X-One", "1"), ("X-Two", "a"), ("X-Two", "b"))
    assert hosts[1].dial_timeout_s == 1.5
    assert hosts[1].tls == TlsFiles(
        (folder / "one.pem", Path("/two.pem")),
        ((folder / "c.pem", folder / "c.key"), (folder / "both.pem", None)),
        True,
    )
    assert hosts[4].tls == TlsFiles((folder / "own.pem",))


def test_the_server_may_be_left_out(tmp_path: Path) -> None:
    write(tmp_path, '[host."https://m.example"]', "docker.io")
    hosts = load_hosts([tmp_path], "docker.io")
    assert [(host.base, host.namespace) for host in hosts] == [
        ("https://m.example/v2", "docker.io"),
        ("https://registry-1.docker.io/v2", None),
    ]
    write(tmp_path, 'server = "https://docker.io"', "docker.io")
    assert load_hosts([tmp_path], "docker.io")[0].namespace is None
    write(tmp_path, "", "127.0.0.1_5000_")
    assert load_hosts([tmp_path], "127.0.0.1:5000")[0].base == "http://127.0.0.1:5000/v2"


def test_the_folder_s_names_are_those_of_containerd(tmp_path: Path) -> None:
    for folder in ("_default", REGISTRY, "registry.example_5000_"):
        write(tmp_path, f'server = "https://{folder.strip("_").replace(":", "-")}.test"', folder)
        found = load_hosts([tmp_path / "not-there", tmp_path], REGISTRY)
        assert folder.strip("_").replace(":", "-") in found[0].base
    assert "default" in load_hosts([tmp_path], "quay.io")[0].base


def test_the_older_layout_of_certificates_counts(tmp_path: Path) -> None:
    folder = tmp_path / REGISTRY
    folder.mkdir()
    for name in ("ca.crt", "me.cert", "me.key", "you.cert"):
        (folder / name).touch()
    (host,) = load_hosts([tmp_path], REGISTRY)
    assert host.tls.ca == (folder / "ca.crt",)
    assert host.tls.client == (
        (folder / "me.cert", folder / "me.key"),
        (folder / "you.cert", None),
    )


@pytest.mark.parametrize(
    "text",
    [
        "server = [",
        "server = 5",
        "server = 'ftp://x'",
        "server = 'https://u:p@x'",
        "server = 'https://x?y=1'",
        "server = 'https://x:port'",
        "server = ' '",
        "server = 'https://m m'",
        "server = 'https://m%00/'",
        "a = " + "[" * 3000,
        "host = 5",
        "[host]\nx = 5",
        "[host.'https://']",
        "[host.'https://m']\ncapabilities = ['fly']",
        "[host.'https://m']\ncapabilities = 'pull'",
        "[host.'https://m']\nskip_verify = 'yes'",
        "[host.'https://m']\ndial_timeout = 'soon'",
        "[host.'https://m']\ndial_timeout = 5",
        "[host.'https://m']\nca = 5",
        "[host.'https://m']\nca = [5]",
        "[host.'https://m']\nclient = [['a', 'b', 'c']]",
        "[host.'https://m']\nclient = [5]",
        "[host.'https://m']\nheader = 'x'",
        "[host.'https://m']\nheader = {x = 5}",
        '[host."https://m"]\nheader = {x = "a\\r\\nb: c"}',
    ],
)
def test_a_file_that_can_t_be_used_is_named(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=str(path)):
        load_hosts([tmp_path], REGISTRY)


def test_a_changed_file_is_seen_without_a_restart(tmp_path: Path) -> None:
    clock = SkippingClock()
    book = HostBook(clock, [tmp_path])
    assert book.hosts(REGISTRY, "pull")[0].base == f"https://{REGISTRY}/v2"
    write(tmp_path, '[host."https://m.example"]\ncapabilities = ["pull"]')
    clock.now_s += 11
    assert book.hosts(REGISTRY, "pull")[0].base == "https://m.example/v2"
    assert [host.base for host in book.hosts(REGISTRY, "resolve")] == [f"https://{REGISTRY}/v2"]


def test_what_was_learnt_of_a_host_is_forgotten_in_time(tmp_path: Path) -> None:
    clock = SkippingClock()
    book = HostBook(clock, [tmp_path])
    write(tmp_path, '[host."https://m.example"]')
    digest = Digest("sha256", "0" * 64)

    def order() -> list[str]:
        return [host.authority for host in book.for_blob(REGISTRY, "app", digest)]

    mirror: Host = book.hosts(REGISTRY, "pull")[0]
    book.suspect(f"{REGISTRY}/app", digest, mirror)
    book.note_rangeless(mirror, "app")
    assert order() == [REGISTRY, "m.example"]
    assert book.is_rangeless(mirror, "app")
    assert not book.is_rangeless(mirror, "other")
    clock.now_s += 601
    assert order() == ["m.example", REGISTRY]
    assert not book.is_rangeless(mirror, "app")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1h30m", 5400), ("1.5s", 1.5), ("300ms", 0.3), ("0", 0), ("2us", 2e-6), (".5m", 30)],
)
def test_durations_are_go_s(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "s", "5 s", "-5s", "5d", "1h-30m", "٣s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration_s(text)


async def test_a_host_s_headers_are_sent_to_it_and_it_must_not_be_asked_more(
    tmp_path: Path,
) -> None:
    async with registry_with(b"0123456789") as (registry, blob), FakeRegistry() as mirror:
        mirror.add_blob("team/app", b"0123456789")
        write(
            tmp_path,
            f'server = "{registry.url}"\n[host."{mirror.url}"]\n'
            'header = {Authorization = "Bearer fixed", X-Who = "ember"}',
            registry.authority,
        )

        def refuse(seen: Seen) -> None:
            assert seen.headers["authorization"] == "Bearer fixed"

        async with registry_client(certs=tmp_path) as client:
            assert await read(client, blob, Extent(2, 3)) == b"234"
        refuse(mirror.seen[0])
        assert mirror.seen[0].headers["x-who"] == "ember"
        assert registry.seen == []


async def test_tls_is_verified_against_the_host_s_own_authority(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with FakeRegistry(authority.server_context()) as registry:
        digest = registry.add_blob("team/app", b"0123456789")
        write(tmp_path, f'server = "{registry.url}"\nca = "{authority.path}"', registry.authority)
        from_file = f"{registry.authority}/team/app"
        blob = BlobRef(from_file, digest, 10)
        async with registry_client(certs=tmp_path) as client:
            assert await read(client, blob, Extent(2, 3)) == b"234"
        write(tmp_path, f'server = "{registry.url}"', registry.authority)
        async with registry_client(certs=tmp_path) as client:
            with pytest.raises(UnavailableError, match="certificate"):
                await read(client, blob, Extent(2, 3))
        write(tmp_path, f'server = "{registry.url}"\nskip_verify = true', registry.authority)
        async with registry_client(certs=tmp_path) as client:
            assert await read(client, blob, Extent(2, 3)) == b"234"


async def test_a_client_certificate_is_shown_where_it_is_wanted(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.client("ember")
    async with FakeRegistry(authority.server_context(want_client=True)) as registry:
        digest = registry.add_blob("team/app", b"0123456789")
        blob = BlobRef(f"{registry.authority}/team/app", digest, 10)
        common = f'server = "{registry.url}"\nca = "{authority.path}"\n'
        write(tmp_path, common, registry.authority)
        async with registry_client(certs=tmp_path) as client:
            with pytest.raises(UnavailableError):
                await read(client, blob, Extent(2, 3))
        write(tmp_path, f'{common}client = [["{certificate}", "{key}"]]', registry.authority)
        async with registry_client(certs=tmp_path) as client:
            assert await read(client, blob, Extent(2, 3)) == b"234"
        write(tmp_path, f'{common}client = "{tmp_path}/missing.pem"', registry.authority)
        async with registry_client(certs=tmp_path) as client:
            with pytest.raises(ConfigError, match=r"missing\.pem"):
                await read(client, blob, Extent(2, 3))
