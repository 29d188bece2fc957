"""Who is let in, with what, and how often it is asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from snapshotter.content import Extent
from snapshotter.errors import BusyError, UnauthorizedError, UnavailableError
from snapshotter.oci.credentials import Credential, MemoryCredentials
from snapshotter.oci.platform import Platform
from snapshotter.oci.reference import parse_reference
from tests.fakes.clients import read, registry_client, registry_with
from tests.fakes.gates import BasicGate, TokenGate
from tests.fakes.http_server import Answer, Seen
from tests.fakes.images import push_image
from tests.fakes.registry import FakeRegistry, answer_with, cut, is_blob
from tests.fakes.skipping_clock import SkippingClock

DATA = b"0123456789" * 1000
PART = Extent(10, 10)
COLONS = Credential("user", "pass:word:ä")


def pulls_for(name: str, *credentials: Credential) -> MemoryCredentials:
    """Of several the first is the one that comes first."""
    pulls = MemoryCredentials()
    for number, credential in enumerate(reversed(credentials)):
        assert pulls.put(f"{name}:v{number}", credential)
    return pulls


async def test_basic_auth_works_with_colons_in_the_password() -> None:
    async with registry_with(DATA) as (registry, blob):
        registry.gate = BasicGate({"user": "pass:word:ä"})
        async with registry_client(pulls=pulls_for(blob.repository, COLONS)) as client:
            for _ in range(3):
                assert await read(client, blob, PART) == DATA[10:20]
        assert len(registry.seen) == 4


async def test_a_token_is_fetched_once_for_all_readers() -> None:
    async with registry_with(DATA) as (registry, blob):
        gate = TokenGate(registry, users={"user": "pass:word:ä"})
        async with registry_client(pulls=pulls_for(blob.repository, COLONS)) as client:
            found = await asyncio.gather(*(read(client, blob, PART) for _ in range(50)))
            assert set(found) == {DATA[10:20]}
            await read(client, blob, PART)
        assert gate.tokens == 1
        assert gate.asked[0].query["scope"] == "repository:team/app:pull"
        assert gate.asked[0].query["service"] == "fake"


async def test_a_public_image_needs_only_an_anonymous_token() -> None:
    async with registry_with(DATA) as (registry, blob):
        gate = TokenGate(registry)
        async with registry_client() as client:
            assert await read(client, blob, PART) == DATA[10:20]
        assert "authorization" not in gate.asked[0].headers


@pytest.mark.parametrize("name", ["token", "access_token"])
@pytest.mark.parametrize("life", [300, 1, None, "soon", -5, 10**30])
async def test_a_token_service_may_word_its_answer_differently(name: str, life: object) -> None:
    async with registry_with(DATA) as (registry, blob):
        TokenGate(registry, field_name=name, expires_in=life)
        async with registry_client() as client:
            assert await read(client, blob, PART) == DATA[10:20]


@pytest.mark.parametrize("status", [401, 403])
async def test_a_token_that_was_revoked_is_renewed_once_for_all(status: int) -> None:
    async with registry_with(DATA) as (registry, blob):
        gate = TokenGate(registry, status=status)
        async with registry_client() as client:
            await read(client, blob, PART)
            gate.revoke()
            found = await asyncio.gather(*(read(client, blob, PART) for _ in range(20)))
            assert set(found) == {DATA[10:20]}
        assert gate.tokens == 2


async def test_a_token_is_renewed_before_it_expires() -> None:
    async with registry_with(DATA) as (registry, blob):
        gate = TokenGate(registry)
        clock = SkippingClock()
        async with registry_client(clock=clock) as client:
            await read(client, blob, PART)
            clock.now_s += 299
            await read(client, blob, PART)
        assert gate.tokens == 2
        refused = [seen for seen in registry.seen if "authorization" not in seen.headers]
        assert len([seen for seen in refused if is_blob(seen)]) == 1


async def test_an_identity_token_is_exchanged_for_a_registry_s() -> None:
    async with registry_with(DATA) as (registry, blob):
        gate = TokenGate(registry, users={}, refresh_tokens=("refresh-me",))
        pulls = pulls_for(blob.repository, Credential(identity_token="refresh-me"))
        async with registry_client(pulls=pulls) as client:
            assert await read(client, blob, PART) == DATA[10:20]
        assert gate.asked[0].method == "POST"
        assert b"grant_type=refresh_token" in gate.asked[0].body


async def test_a_registry_token_is_sent_as_it_is() -> None:
    async with registry_with(DATA) as (registry, blob):
        gate = TokenGate(registry, users={})
        gate.good.add("ready-made")
        pulls = pulls_for(blob.repository, Credential(registry_token="ready-made"))
        async with registry_client(pulls=pulls) as client:
            assert await read(client, blob, PART) == DATA[10:20]
        assert len(registry.seen) == 1


@pytest.mark.parametrize("status", [401, 403])
async def test_the_next_credential_is_tried_when_one_is_refused(status: int) -> None:
    wrong, right = Credential("user", "wrong"), Credential("user", "right")
    async with registry_with(DATA) as (registry, blob):
        registry.gate = BasicGate({"user": "right"}, status)
        async with registry_client(pulls=pulls_for(blob.repository, wrong, right)) as client:
            await read(client, blob, PART)
            before = len(registry.seen)
            await read(client, blob, PART)
            assert len(registry.seen) == before + 1


async def test_a_public_image_is_read_though_the_credential_is_wrong() -> None:
    class PublicGate(TokenGate):
        """Gives a token only to who shows no credential."""

        def _may(self, seen: Seen) -> bool:
            return "authorization" not in seen.headers

    async with registry_with(DATA) as (registry, blob):
        PublicGate(registry)
        pulls = pulls_for(blob.repository, Credential("user", "wrong"))
        async with registry_client(pulls=pulls) as client:
            assert await read(client, blob, PART) == DATA[10:20]


async def test_a_refusal_names_the_sources_and_shows_no_secret() -> None:
    async with registry_with(DATA) as (registry, blob):
        registry.gate = BasicGate({})
        pulls = pulls_for(blob.repository, Credential("user", "s3cr3t"))
        async with registry_client(pulls=pulls) as client:
            with pytest.raises(UnauthorizedError, match="credentials of pulls") as caught:
                await read(client, blob, PART)
        shown = f"{caught.value!r} {caught.value.__cause__!r}"
        assert "s3cr3t" not in shown


async def test_a_lost_image_does_not_storm_its_registry() -> None:
    async with registry_with(DATA) as (registry, blob):
        registry.gate = BasicGate({})
        clock = SkippingClock()
        pulls = pulls_for(blob.repository, Credential("user", "wrong"))
        async with registry_client(pulls=pulls, clock=clock) as client:
            for _ in range(50):
                with pytest.raises(UnauthorizedError):
                    await read(client, blob, PART)
            assert len(registry.seen) < 5
            registry.gate = None
            clock.now_s += 6
            assert await read(client, blob, PART) == DATA[10:20]


async def test_a_new_credential_is_used_at_once() -> None:
    async with registry_with(DATA) as (registry, blob):
        registry.gate = BasicGate({"user": "right"})
        pulls = pulls_for(blob.repository, Credential("user", "wrong"))
        async with registry_client(pulls=pulls) as client:
            with pytest.raises(UnauthorizedError):
                await read(client, blob, PART)
            pulls.put(blob.repository, Credential("user", "right"))
            assert await read(client, blob, PART) == DATA[10:20]


async def test_a_forgotten_credential_is_used_no_more() -> None:
    async with registry_with(DATA) as (registry, blob):
        registry.gate = BasicGate({"user": "right"})
        pulls = pulls_for(blob.repository, Credential("user", "right"))
        async with registry_client(pulls=pulls) as client:
            await read(client, blob, PART)
            assert pulls.forget(f"{blob.repository}:v0")
            with pytest.raises(UnauthorizedError):
                await read(client, blob, PART)


async def test_a_credential_given_for_a_pull_serves_its_reads() -> None:
    async with FakeRegistry() as registry, registry_client() as client:
        push_image(registry, "app", [DATA])
        TokenGate(registry, users={"user": "right"})
        reference = parse_reference(f"{registry.authority}/app")
        with pytest.raises(UnauthorizedError):
            await client.resolve(reference, Platform("linux", "amd64"))
        image = await client.resolve(
            reference, Platform("linux", "amd64"), Credential("user", "right")
        )
        assert await read(client, image.blob(image.layers[0]), PART) == DATA[10:20]


async def test_a_token_service_that_is_down_is_no_refusal() -> None:
    async with registry_with(DATA) as (registry, blob):
        TokenGate(registry)
        registry.inject(answer_with(502), lambda seen: seen.path == "/token", times=1)
        async with registry_client() as client:
            with pytest.raises(UnavailableError):
                await read(client, blob, PART)
            assert await read(client, blob, PART) == DATA[10:20]


async def test_a_busy_token_service_is_left_alone() -> None:
    async with registry_with(DATA) as (registry, blob):
        gate = TokenGate(registry)
        busy = answer_with(429, ("Retry-After", "7"))
        registry.inject(busy, lambda seen: seen.path == "/token", times=1)
        async with registry_client() as client:
            for _ in range(5):
                with pytest.raises(BusyError) as caught:
                    await read(client, blob, PART)
            assert caught.value.retry_after_s is not None
        assert len(gate.asked) == 1


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"token": ""}', b'{"token": 5}', b'{"token": "a\\r\\nX: y"}', b"\xff"]
)
async def test_an_answer_without_a_token_is_unavailability(body: bytes) -> None:
    async with registry_with(DATA) as (registry, blob):
        TokenGate(registry)
        registry.page("/token", lambda seen: Answer(200, [], body))
        async with registry_client() as client:
            with pytest.raises(UnavailableError, match="token service"):
                await read(client, blob, PART)


@pytest.mark.parametrize(
    "realm", ["ftp://x/", "http://u:p@x/", "http://[::1", "token", "http://h:x/"]
)
async def test_a_senseless_realm_gets_no_credential(realm: str) -> None:
    async with registry_with(DATA) as (registry, blob):
        TokenGate(registry, realm=realm)
        pulls = pulls_for(blob.repository, COLONS)
        async with registry_client(pulls=pulls) as client:
            with pytest.raises(UnauthorizedError, match="token service"):
                await read(client, blob, PART)


async def test_401_in_mid_stream_is_met_with_a_new_token() -> None:
    data = bytes(range(256)) * 2000
    async with registry_with(data) as (registry, blob):
        gate = TokenGate(registry)
        async with registry_client() as client:
            registry.inject(cut(100_000), lambda seen: bool(gate.tokens) and is_blob(seen), times=1)
            found = b""
            async for chunk in client.stream(blob):
                if not found:
                    gate.revoke()
                found += chunk
            assert found == data
        assert gate.tokens == 2


async def test_a_mirror_gets_its_own_credentials_and_not_the_registry_s(tmp_path: Path) -> None:
    async with registry_with(DATA) as (registry, blob), FakeRegistry() as mirror:
        mirror.add_blob("team/app", DATA)
        gate = BasicGate({"mirror-user": "mirror-word"})
        mirror.gate = gate
        folder = tmp_path / registry.authority
        folder.mkdir()
        (folder / "hosts.toml").write_text(f'server = "{registry.url}"\n[host."{mirror.url}"]\n')
        pulls = pulls_for(blob.repository, Credential("user", "registry-word"))
        async with registry_client(certs=tmp_path, pulls=pulls) as client:
            assert await read(client, blob, PART) == DATA[10:20]
            assert [seen.headers.get("authorization") for seen in mirror.seen] == [None]
            assert len(registry.seen) == 1
        pulls.put(f"{mirror.authority}/team/app", Credential("mirror-user", "mirror-word"))
        async with registry_client(certs=tmp_path, pulls=pulls) as client:
            assert await read(client, blob, PART) == DATA[10:20]
            assert len(registry.seen) == 1


async def test_what_the_registry_let_in_is_known_for_others_to_use() -> None:
    async with FakeRegistry() as registry:
        push_image(registry, "team/app", [DATA])
        push_image(registry, "public/app", [DATA])
        users = {"user": COLONS.password}
        gate = BasicGate(users)
        registry.gate = gate
        name = f"{registry.authority}/team/app"
        wrong = Credential("user", "old")
        async with registry_client(pulls=pulls_for(name, wrong, COLONS)) as client:
            reference = parse_reference(name)
            assert client.login(reference) is None
            await client.resolve(reference, Platform("linux", "amd64"))
            login = client.login(reference)
            assert login is not None
            assert (login.authority, login.credential) == (registry.authority, COLONS)
            assert COLONS.password not in repr(login)
            registry.gate = None
            public = parse_reference(f"{registry.authority}/public/app")
            await client.resolve(public, Platform("linux", "amd64"))
            assert client.login(public) is None


async def test_what_a_mirror_let_in_is_not_for_the_registry(tmp_path: Path) -> None:
    async with FakeRegistry() as mirror:
        push_image(mirror, "team/app", [DATA])
        mirror.gate = BasicGate({"user": COLONS.password})
        hosts = tmp_path / "registry.example"
        hosts.mkdir()
        (hosts / "hosts.toml").write_text(f'[host."{mirror.url}"]\n')
        pulls = pulls_for(f"{mirror.authority}/team/app", COLONS)
        async with registry_client(certs=tmp_path, pulls=pulls) as client:
            reference = parse_reference("registry.example/team/app")
            await client.resolve(reference, Platform("linux", "amd64"))
            assert len(mirror.seen) > 1
            assert client.login(reference) is None
