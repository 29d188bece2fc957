"""What refers to an image is found by API or tag, and no answer, however odd, does harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from snapshotter.content import Digest
from snapshotter.errors import EmberError, RefusedError, UnavailableError
from snapshotter.oci.reference import Reference
from snapshotter.oci.referrers import LIST_LIMIT_BYTES, REFERRER_LIMIT, fallback_tag
from snapshotter.oci.registry import RegistryClient
from tests.fakes.clients import registry_client
from tests.fakes.http_server import Answer, Seen
from tests.fakes.registry import Change, answer_with, cut, sha256
from tests.fakes.writable import OCI_INDEX, WritableRegistry

KIND = "application/vnd.ember.image.index.v1"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
IMAGE = sha256(b"the image")
REPOSITORY = "team/app"


def _manifest(number: int, kind: str = KIND, subject: Digest = IMAGE) -> bytes:
    document = {
        "schemaVersion": 2,
        "artifactType": kind,
        "config": {"mediaType": "application/vnd.oci.empty.v1+json"},
        "subject": {"digest": str(subject)},
        "annotations": {"number": str(number)},
    }
    return json.dumps(document).encode()


def _attach(registry: WritableRegistry, count: int, kind: str = KIND) -> list[Digest]:
    manifests = [_manifest(number, kind) for number in range(count)]
    return [registry.add_manifest(REPOSITORY, data, MANIFEST) for data in manifests]


def _list_under_tag(registry: WritableRegistry, entries: list[dict[str, Any]]) -> None:
    index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}
    registry.add_manifest(REPOSITORY, json.dumps(index).encode(), OCI_INDEX, fallback_tag(IMAGE))


def _entry(data: bytes, **more: Any) -> dict[str, Any]:
    entry = {"mediaType": MANIFEST, "digest": str(sha256(data)), "size": len(data)}
    return {**entry, "artifactType": KIND, **more}


async def _found(client: RegistryClient, registry: WritableRegistry) -> list[Digest]:
    image = Reference(registry.authority, REPOSITORY, None, IMAGE)
    return [entry.digest for entry in await client.referrers(image, KIND)]


async def test_nothing_refers_to_an_image_that_nobody_indexed() -> None:
    for api in (True, False):
        async with WritableRegistry(api=api) as registry, registry_client() as client:
            assert await _found(client, registry) == []


@pytest.mark.parametrize("filters", [True, False])
async def test_the_api_lists_what_is_of_the_type(filters: bool) -> None:
    async with WritableRegistry() as registry, registry_client() as client:
        registry.filters = filters
        _attach(registry, 2, "application/spdx+json")
        wanted = _attach(registry, 2)
        assert await _found(client, registry) == wanted
        assert registry.asked(f"referrers/{IMAGE}?artifactType={KIND}")


async def test_all_pages_are_read() -> None:
    async with WritableRegistry() as registry, registry_client() as client:
        registry.page_entries = 2
        wanted = _attach(registry, 5)
        assert await _found(client, registry) == wanted
        assert len(registry.asked("/referrers/")) == 3


async def test_endless_pages_end() -> None:
    async with WritableRegistry() as registry, registry_client() as client:
        registry.page_entries = 1
        _attach(registry, 40)
        assert len(await _found(client, registry)) == 16


async def test_a_list_is_bounded() -> None:
    async with WritableRegistry() as registry, registry_client() as client:
        registry.page_entries = 5000
        _attach(registry, REFERRER_LIMIT + 5)
        assert len(await _found(client, registry)) == REFERRER_LIMIT


async def test_all_pages_together_are_no_longer_than_one_may_be() -> None:
    """Sixteen of the longest would take a node's memory."""
    async with WritableRegistry() as registry, registry_client() as client:
        registry.page_entries = 1
        _attach(registry, 12)

        def long(seen: Seen, answer: Answer) -> Answer:
            answer.body = answer.body + b" " * (LIST_LIMIT_BYTES // 4)
            return answer

        registry.inject(long, lambda seen: "/referrers/" in seen.path)
        with pytest.raises(RefusedError, match="longer than"):
            await _found(client, registry)
        assert sum("/referrers/" in seen.path for seen in registry.seen) == 4


async def test_a_next_page_elsewhere_is_not_asked_for() -> None:
    async with WritableRegistry() as other, WritableRegistry() as registry:
        link = f'<{other.url}/v2/{REPOSITORY}/referrers/{IMAGE}>; rel="next"'
        registry.inject(lambda seen, answer: _with(answer, "Link", link))
        wanted = _attach(registry, 1)
        async with registry_client() as client:
            assert await _found(client, registry) == wanted
        assert not other.seen


def _with(answer: Answer, name: str, value: str) -> Answer:
    answer.set(name, value)
    return answer


@pytest.mark.parametrize("status", [400, 404, 405, 501])
async def test_the_tag_stands_for_an_api_that_is_not_there(status: int) -> None:
    async with WritableRegistry(api=False) as registry, registry_client() as client:
        data = [_manifest(0), _manifest(1, "application/spdx+json"), _manifest(2)]
        other = _entry(data[1], artifactType="application/spdx+json")
        empty = _entry(_manifest(3), artifactType="application/vnd.oci.empty.v1+json")
        untyped = _entry(data[2])
        del untyped["artifactType"]
        _list_under_tag(registry, [untyped, empty, other, *2 * [_entry(data[0])]])
        registry.inject(answer_with(status), lambda seen: "/referrers/" in seen.path)
        told = [sha256(data[0]), sha256(data[2]), sha256(_manifest(3))]
        assert await _found(client, registry) == told


async def test_a_page_for_people_is_no_api() -> None:
    async with WritableRegistry() as registry, registry_client() as client:
        page = Answer(200, [("Content-Type", "text/html; charset=utf-8")], b"<html>Welcome</html>")
        registry.inject(lambda seen, answer: page, lambda seen: "/referrers/" in seen.path)
        data = _manifest(0)
        _list_under_tag(registry, [_entry(data)])
        assert await _found(client, registry) == [sha256(data)]


def _body(data: bytes, kind: str = OCI_INDEX) -> Change:
    return lambda seen, answer: Answer(200, [("Content-Type", kind)], data)


def _index(**fields: Any) -> bytes:
    return json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, **fields}).encode()


HOSTILE: dict[str, tuple[Change, str]] = {
    "no JSON": (_body(b"<html>"), "not the JSON"),
    "a huge list": (_body(b" " * (LIST_LIMIT_BYTES + 1)), "longer than"),
    "deep": (_body(b"[" * 100_000), "not the JSON"),
    "an image": (_body(_manifest(0)), "no image index"),
    "another type": (_body(_index(mediaType=MANIFEST, manifests=[])), "not of type"),
    "no list": (_body(_index(manifests={"a": 1})), "not a list"),
    "thousands": (_body(_index(manifests=[{}] * 5000)), "more than 4096"),
    "no digest": (_body(_index(manifests=[{"digest": "../../etc", "size": 1}])), "not a digest"),
    "no size": (_body(_index(manifests=[{"digest": str(IMAGE), "size": -1}])), "'size'"),
    "bad note": (_body(_index(manifests=[{**_entry(b""), "annotations": 3}])), "not a map"),
    "bad kind": (_body(_index(manifests=[{**_entry(b""), "artifactType": 3}])), "not a string"),
}


@pytest.mark.parametrize("where", ["/referrers/", "/manifests/"])
@pytest.mark.parametrize("name", HOSTILE)
async def test_what_is_no_list_is_refused(name: str, where: str) -> None:
    change, reason = HOSTILE[name]
    async with WritableRegistry(api=where == "/referrers/") as registry:
        registry.inject(change, lambda seen: where in seen.path)
        async with registry_client() as client:
            with pytest.raises(RefusedError, match=reason):
                await _found(client, registry)


@pytest.mark.parametrize(
    "change",
    [answer_with(500), answer_with(429, ("Retry-After", "7")), cut(-1), cut(10), cut(10, "hang")],
)
async def test_a_registry_in_trouble_is_no_empty_list(change: Change) -> None:
    async with WritableRegistry() as registry, registry_client() as client:
        _attach(registry, 1)
        registry.inject(change, _is_referrers)
        with pytest.raises(UnavailableError):
            await _found(client, registry)


def _is_referrers(seen: Seen) -> bool:
    return "/referrers/" in seen.path


async def test_a_refusal_says_so() -> None:
    async with WritableRegistry() as registry, registry_client() as client:
        registry.inject(answer_with(403), _is_referrers)
        with pytest.raises(EmberError, match="lets in none of the credentials"):
            await _found(client, registry)


def _with_mirror(folder: Path, mirror: str, registry: WritableRegistry, words: str) -> Path:
    own = folder / registry.authority
    own.mkdir()
    text = f'server = "{registry.url}"\n[host."{mirror}"]\ncapabilities = [{words}]\n'
    (own / "hosts.toml").write_text(text)
    return folder


async def test_a_mirror_that_has_nothing_does_not_end_the_search(tmp_path: Path) -> None:
    async with WritableRegistry() as mirror, WritableRegistry() as registry:
        certs = _with_mirror(tmp_path, mirror.url, registry, '"pull", "referrers"')
        wanted = _attach(registry, 1)
        async with registry_client(certs=certs) as client:
            assert await _found(client, registry) == wanted
        (asked,) = mirror.asked("/referrers/")
        assert asked.query == {"artifactType": KIND, "ns": registry.authority}


async def test_a_mirror_without_referrers_is_asked_for_the_tag_alone(tmp_path: Path) -> None:
    async with WritableRegistry() as mirror, WritableRegistry() as registry:
        certs = _with_mirror(tmp_path, mirror.url, registry, '"pull", "resolve"')
        data = _manifest(0)
        _list_under_tag(mirror, [_entry(data)])
        async with registry_client(certs=certs) as client:
            registry.inject(answer_with(500))
            assert await _found(client, registry) == [sha256(data)]
            registry.heal()
            wanted = _attach(registry, 1)
            assert await _found(client, registry) == wanted
        assert not mirror.asked("/referrers/")


@pytest.mark.parametrize(
    ("digest", "tag"),
    [
        (IMAGE, f"sha256-{IMAGE.hex}"),
        (Digest("sha512", "a" * 128), f"sha512-{'a' * 64}"),
    ],
)
def test_the_tag_is_that_of_the_specification(digest: Digest, tag: str) -> None:
    assert fallback_tag(digest) == tag
