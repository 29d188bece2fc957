"""Pushing: whole, in pieces, mounted; into registries that have their own ideas."""

from __future__ import annotations

import asyncio
import json
import random
import threading

import pytest

from snapshotter.errors import DeadlineError, EmberError, RefusedError, UnavailableError
from snapshotter.oci import pushing
from snapshotter.oci.attaching import ROUND_LIMIT, attach
from snapshotter.oci.documents import OCI_MANIFEST, Descriptor
from snapshotter.oci.pushing import BytesBody, Pusher, UploadPace
from snapshotter.oci.reference import Reference
from snapshotter.oci.referrers import fallback_tag
from snapshotter.oci.registry import RegistryClient
from snapshotter.oci.retry import Patience
from tests.fakes.clients import registry_client
from tests.fakes.http_server import Answer, Seen
from tests.fakes.registry import Change, answer_with, cut, sha256
from tests.fakes.short_clock import ShortClock
from tests.fakes.skipping_clock import SkippingClock
from tests.fakes.writable import WritableRegistry

DATA = random.Random(3).randbytes(200_000)
DIGEST = sha256(DATA)
IMAGE = sha256(b"the image")
TYPE = "application/vnd.ember.image.index.v1"


def _pusher(client: RegistryClient, registry: WritableRegistry) -> Pusher:
    return Pusher(client.asker, Reference(registry.authority, "team/app"), SkippingClock())


def _kept(registry: WritableRegistry) -> bytes | None:
    return registry.repository("team/app").blobs.get(str(DIGEST))


async def test_a_blob_is_pushed_once() -> None:
    async with WritableRegistry() as registry, registry_client() as client:
        pusher = _pusher(client, registry)
        assert await pusher.blob(DIGEST, BytesBody(DATA))
        assert not await pusher.blob(DIGEST, BytesBody(DATA))
        assert _kept(registry) == DATA
        assert [seen.method for seen in registry.seen] == ["HEAD", "POST", "PUT", "HEAD"]
        assert registry.seen[2].query["state"] == "a/b"


async def test_a_blob_of_another_repository_is_mounted() -> None:
    async with WritableRegistry() as registry, registry_client() as client:
        registry.add_blob("team/base", DATA)
        assert await _pusher(client, registry).blob(DIGEST, BytesBody(DATA), "team/base")
        assert _kept(registry) == DATA
        assert [seen.method for seen in registry.seen] == ["HEAD", "POST"]


async def test_what_cannot_be_mounted_is_uploaded() -> None:
    async with WritableRegistry() as registry, registry_client() as client:
        assert await _pusher(client, registry).blob(DIGEST, BytesBody(DATA), "team/base")
        assert _kept(registry) == DATA


async def test_a_long_blob_goes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushing, "WHOLE_LIMIT_BYTES", 64_000)
    async with WritableRegistry() as registry, registry_client() as client:
        assert await _pusher(client, registry).blob(DIGEST, BytesBody(DATA))
        assert _kept(registry) == DATA
        methods = [seen.method for seen in registry.seen]
        assert methods == ["HEAD", "POST", *["PATCH"] * 4, "PUT"]


@pytest.mark.parametrize("whole_bytes", [64_000, 10**9], ids=["in pieces", "whole"])
async def test_a_slow_disk_holds_up_nobody_else(
    monkeypatch: pytest.MonkeyPatch, whole_bytes: int
) -> None:
    class Slow(BytesBody):
        def read(self, offset: int, length: int) -> bytes:
            readers.add(threading.get_ident())
            return super().read(offset, length)

    readers: set[int] = set()
    monkeypatch.setattr(pushing, "WHOLE_LIMIT_BYTES", whole_bytes)
    async with WritableRegistry() as registry, registry_client() as client:
        assert await _pusher(client, registry).blob(DIGEST, Slow(DATA))
        assert _kept(registry) == DATA
    assert readers and threading.get_ident() not in readers


async def test_a_long_blob_goes_whole_where_pieces_are_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pushing, "WHOLE_LIMIT_BYTES", 64_000)
    async with WritableRegistry() as registry, registry_client() as client:
        registry.pieces = False
        assert await _pusher(client, registry).blob(DIGEST, BytesBody(DATA))
        assert _kept(registry) == DATA


async def test_a_blob_goes_in_pieces_where_it_is_too_much_at_once() -> None:
    async with WritableRegistry() as registry, registry_client() as client:
        registry.whole_bytes = 1000
        assert await _pusher(client, registry).blob(DIGEST, BytesBody(DATA))
        assert _kept(registry) == DATA


async def test_what_is_taken_in_no_way_is_refused() -> None:
    async with WritableRegistry() as registry, registry_client() as client:
        registry.whole_bytes, registry.pieces = 1000, False
        with pytest.raises(RefusedError, match="neither whole nor in pieces"):
            await _pusher(client, registry).blob(DIGEST, BytesBody(DATA))


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT"])
@pytest.mark.parametrize(
    "change", [answer_with(500), answer_with(429, ("Retry-After", "2")), cut(-1), cut(-1, "reset")]
)
async def test_a_push_outlasts_trouble(method: str, change: Change) -> None:
    async with WritableRegistry() as registry:
        clock = SkippingClock()
        registry.inject(change, lambda seen: seen.method == method, times=2)
        async with registry_client(clock=clock) as client:
            target = Reference(registry.authority, "team/app")
            await Pusher(client.asker, target, clock).blob(DIGEST, BytesBody(DATA))
        assert _kept(registry) == DATA


@pytest.mark.parametrize("status", [400, 405, 413, 415])
async def test_what_the_registry_will_not_take_is_not_tried_again(status: int) -> None:
    async with WritableRegistry() as registry, registry_client() as client:
        registry.inject(answer_with(status), lambda seen: seen.method == "POST")
        with pytest.raises(RefusedError, match=f"answered {status}"):
            await _pusher(client, registry).blob(DIGEST, BytesBody(DATA))
        assert len(registry.asked("/uploads/")) == 1


LOCATIONS = ["", "ftp://example.org/x", "http://a:b@example.org/x", "http://[::1", "//:0/x"]


@pytest.mark.parametrize("location", LOCATIONS)
async def test_a_location_of_no_use_is_no_crash(location: str) -> None:
    async with WritableRegistry() as registry, registry_client() as client:
        told = answer_with(202, ("Location", location))
        registry.inject(told, lambda seen: seen.method == "POST")
        with pytest.raises(UnavailableError, match=r"Location|TLS|answer|connect|route"):
            await _pusher(client, registry).blob(DIGEST, BytesBody(DATA))
        assert _kept(registry) is None


async def test_a_registry_that_takes_nothing_ends_the_push() -> None:
    async def stand_still(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await done.wait()
        writer.close()

    done = asyncio.Event()
    deaf = await asyncio.start_server(stand_still, "127.0.0.1", 0)
    place = f"http://127.0.0.1:{deaf.sockets[0].getsockname()[1]}/v2/team/app/blobs/uploads/1"
    body = BytesBody(bytes(16 * 1024 * 1024))
    async with WritableRegistry() as registry, registry_client() as client:
        there = answer_with(202, ("Location", place))
        registry.inject(there, lambda seen: seen.method == "POST")
        target = Reference(registry.authority, "team/app")
        once, pace = Patience(attempts=1), UploadPace(0.5, 1e9)
        pusher = Pusher(client.asker, target, SkippingClock(), once, pace=pace)
        with pytest.raises(DeadlineError, match="no answer in"):
            await pusher.blob(sha256(body.data), body)
        done.set()
    deaf.close()


class _Bearer:
    """Lets in tokens by action, and tells what it wants."""

    def __init__(self, registry: WritableRegistry, can_push: bool = True) -> None:
        self._registry = registry
        self._can_push = can_push
        registry.page("/token", self._token)
        registry.gate = self

    def _token(self, seen: Seen) -> Answer:
        scope = seen.query["scope"]
        push = scope.endswith("push") and self._can_push
        return Answer(200, [], json.dumps({"token": "push" if push else "pull"}).encode())

    def check(self, seen: Seen) -> Answer | None:
        writes = seen.method not in ("GET", "HEAD")
        enough = ("Bearer push",) if writes else ("Bearer push", "Bearer pull")
        if seen.headers.get("authorization") in enough:
            return None
        actions = "pull,push" if writes else "pull"
        realm = f'Bearer realm="{self._registry.url}/token",service="s"'
        scope = f'scope="repository:team/app:{actions}"'
        return answer_with(401, ("WWW-Authenticate", f"{realm},{scope}"))(seen, Answer())


async def test_the_right_to_push_is_asked_for_when_it_is_needed() -> None:
    async with WritableRegistry() as registry, registry_client() as client:
        _Bearer(registry)
        assert await _pusher(client, registry).blob(DIGEST, BytesBody(DATA))
        scopes = [seen.query["scope"] for seen in registry.asked("/token")]
        assert scopes == ["repository:team/app:pull", "repository:team/app:pull,push"]


async def test_who_may_not_push_may_still_pull() -> None:
    async with WritableRegistry() as registry, registry_client() as client:
        _Bearer(registry, can_push=False)
        registry.add_manifest("team/app", b'{"schemaVersion":2,"layers":[]}', OCI_MANIFEST, "1")
        with pytest.raises(EmberError, match="lets in none"):
            await _pusher(client, registry).blob(DIGEST, BytesBody(DATA))
        named = Reference(registry.authority, "team/app", None, IMAGE)
        assert await client.referrers(named, TYPE) == []


async def test_no_credential_follows_an_upload_elsewhere() -> None:
    async with WritableRegistry() as other, WritableRegistry() as registry:
        _Bearer(registry)
        elsewhere = answer_with(202, ("Location", f"{other.url}/v2/team/app/blobs/uploads/1"))
        registry.inject(elsewhere, lambda seen: seen.method == "POST" and _let_in(seen))
        async with registry_client() as client:
            with pytest.raises(UnavailableError):
                await _pusher(client, registry).blob(DIGEST, BytesBody(DATA))
        assert other.seen
        assert not any(_let_in(seen) for seen in other.seen)


def _let_in(seen: Seen) -> bool:
    return "authorization" in seen.headers


def _referrer(number: int) -> tuple[bytes, Descriptor]:
    document = {
        "schemaVersion": 2,
        "artifactType": TYPE,
        "config": {"mediaType": "application/vnd.oci.empty.v1+json"},
        "subject": {"digest": str(IMAGE)},
        "annotations": {"number": str(number)},
    }
    data = json.dumps(document).encode()
    return data, Descriptor(OCI_MANIFEST, sha256(data), len(data), artifact_type=TYPE)


def _image(registry: WritableRegistry) -> Reference:
    return Reference(registry.authority, "team/app", None, IMAGE)


def _under_tag(registry: WritableRegistry) -> list[str]:
    index = registry.tagged("team/app", fallback_tag(IMAGE))
    return [entry["digest"] for entry in index["manifests"]]


async def test_a_registry_that_knows_subjects_needs_no_tag() -> None:
    async with WritableRegistry() as registry, registry_client() as client:
        data, entry = _referrer(1)
        await attach(_pusher(client, registry), _image(registry), data, entry)
        assert [e.digest for e in await client.referrers(_image(registry), TYPE)] == [entry.digest]
        assert not registry.repository("team/app").tags


async def test_one_that_does_not_gets_the_tag() -> None:
    async with WritableRegistry(api=False) as registry, registry_client() as client:
        data, entry = _referrer(1)
        for _ in range(2):
            await attach(_pusher(client, registry), _image(registry), data, entry)
        assert _under_tag(registry) == [str(entry.digest)]
        assert [e.digest for e in await client.referrers(_image(registry), TYPE)] == [entry.digest]


async def test_what_others_listed_stays_as_it_was() -> None:
    async with WritableRegistry(api=False) as registry, registry_client() as client:
        other = {"mediaType": "a/b", "digest": str(sha256(b"x")), "size": 1, "data": "eA=="}
        index = {"schemaVersion": 2, "manifests": [other], "annotations": {"a": "b"}}
        tag, kind = fallback_tag(IMAGE), "application/vnd.oci.image.index.v1+json"
        registry.add_manifest("team/app", json.dumps(index).encode(), kind, tag)
        data, entry = _referrer(1)
        await attach(_pusher(client, registry), _image(registry), data, entry)
        merged = registry.tagged("team/app", tag)
        assert merged["manifests"][0] == other
        assert merged["annotations"] == {"a": "b"}
        assert len(merged["manifests"]) == 2


async def test_a_tag_that_holds_an_image_is_not_overwritten() -> None:
    async with WritableRegistry(api=False) as registry, registry_client() as client:
        mine = b'{"schemaVersion":2,"layers":[],"config":{}}'
        registry.add_manifest("team/app", mine, OCI_MANIFEST, fallback_tag(IMAGE))
        data, entry = _referrer(1)
        with pytest.raises(RefusedError, match="no image index"):
            await attach(_pusher(client, registry), _image(registry), data, entry)
        assert registry.tagged("team/app", fallback_tag(IMAGE)) == json.loads(mine)


async def test_many_that_push_at_once_are_all_listed() -> None:
    async with WritableRegistry(api=False) as registry, registry_client() as client:
        referrers = [_referrer(number) for number in range(4)]
        target = Reference(registry.authority, "team/app")
        clock = ShortClock()
        await asyncio.gather(
            *(
                attach(Pusher(client.asker, target, clock), _image(registry), data, entry)
                for data, entry in referrers
            )
        )
        assert sorted(_under_tag(registry)) == sorted(str(e.digest) for _, e in referrers)


async def test_who_is_always_overwritten_gives_up() -> None:
    async with WritableRegistry(api=False) as registry, registry_client() as client:
        data, entry = _referrer(1)
        empty = {"schemaVersion": 2, "manifests": []}
        body = json.dumps(empty).encode()
        registry.inject(
            lambda seen, answer: Answer(200, [], body),
            lambda seen: seen.method == "GET" and "/manifests/sha256-" in seen.path,
        )
        with pytest.raises(UnavailableError, match=f"{ROUND_LIMIT} times"):
            await attach(_pusher(client, registry), _image(registry), data, entry)
        puts = [seen for seen in registry.asked("sha256-") if seen.method == "PUT"]
        assert len(puts) == ROUND_LIMIT
