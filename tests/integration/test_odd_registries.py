"""Nine odd registries that other clients met, each with its right answer, met twice by the daemon.

Once in a first pull, which streams whole blobs and is broken off in the middle, and once when
a container reads an image whose index is here and whose bytes are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from tests.cases.images import ImageCase, digest
from tests.fakes.gates import BasicGate, Storage, TokenGate
from tests.fakes.http_server import Answer, Seen
from tests.fakes.registry import FakeRegistry, answer_with, cut, header, is_range
from tests.integration.registry_scene import Scene, noisy, read_all, scene_in
from tests.integration.test_registry_credentials import FILE, PASSWORD, USER, write_sources
from tests.readers import ended_well, reader, sha256_of

pytestmark = [pytest.mark.root, pytest.mark.containerd]

SIZE = 600_000
BREAK = 100_000
BROKEN = 4
"""Whole bodies that break off: enough for one of each layer, where leave is asked with one too."""
FIRST, LAZY = "first pull", "lazily"
both_ways = pytest.mark.parametrize("way", [FIRST, LAZY])
RIGHT = ["", ""]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene_in(tmp_path_factory.mktemp("odd"), write_sources) as made:
        yield made


@pytest.fixture
def registry(scene: Scene) -> Iterator[FakeRegistry]:
    with scene.registries.another() as made:
        yield made


@contextmanager
def met(
    scene: Scene, registry: FakeRegistry, case: ImageCase, way: str, be_odd: Callable[[], object]
) -> Iterator[Path]:
    """The image mounted, with the registry odd since before the bytes that count were asked for."""
    if way == LAZY:
        scene.lazily(case, registry)
        be_odd()
    else:
        reference = scene.add(case, registry)
        be_odd()
        registry.inject(cut(BREAK), lambda seen: is_whole_layer(seen, case), times=BROKEN)
        assert scene.node.pull(reference).lazy_layers == len(case.rows)
    with scene.node.mounted(case.chain_id) as root:
        yield root


def layers_asked(registry: FakeRegistry, case: ImageCase) -> list[Seen]:
    """Requests for layers: a config is a blob too."""
    return [seen for seen in registry.seen if is_layer(seen, case)]


def is_layer(seen: Seen, case: ImageCase) -> bool:
    layers = case.contents[: len(case.rows)]
    return seen.path.rpartition("/")[2] in [digest(content) for content in layers]


def is_whole_layer(seen: Seen, case: ImageCase) -> bool:
    return is_layer(seen, case) and not is_range(seen)


def whole(registry: FakeRegistry, case: ImageCase) -> Callable[[Seen, Answer], Answer]:
    def change(seen: Seen, answer: Answer) -> Answer:
        data = registry.repositories[case.repository].blobs[seen.path.rpartition("/")[2]]
        return replace(answer, status=200, headers=[], body=data)

    return change


@both_ways
def test_the_whole_body_for_every_range_is_read_as_one_stream(
    scene: Scene, registry: FakeRegistry, way: str
) -> None:
    case = noisy(f"whole bodies {way}", SIZE)
    odd = whole(registry, case)
    with met(scene, registry, case, way, lambda: registry.inject(odd, is_range)) as root:
        assert read_all(scene, case, root) == RIGHT
    each = 2 if way == LAZY else 6  # leave, a stream, and a range and a stream after each break
    assert len(layers_asked(registry, case)) <= each * len(case.rows)


@both_ways
def test_206_without_content_range_is_a_failed_fetch_and_never_bytes(
    scene: Scene, registry: FakeRegistry, way: str
) -> None:
    case = noisy(f"no content-range {way}", SIZE)
    odd = header("Content-Range", None)
    mark = len(scene.node.ember.log())
    with met(scene, registry, case, way, lambda: registry.inject(odd, is_range)) as root:
        if way == LAZY:
            assert all("Input/output error" in said for said in read_all(scene, case, root))
            why = [complaint.why for complaint in scene.complaints(mark)]
            assert why
            assert all("206 without Content-Range" in each for each in why)
            registry.heal()
            assert scene.node.until(lambda: read_all(scene, case, root) == RIGHT, 20)
        else:
            assert read_all(scene, case, root) == RIGHT


@both_ways
def test_400_to_every_range_is_met_with_one_request_for_the_whole(
    scene: Scene, registry: FakeRegistry, way: str
) -> None:
    case = noisy(f"no ranges {way}", SIZE)
    odd = answer_with(400)
    with met(scene, registry, case, way, lambda: registry.inject(odd, is_range)) as root:
        assert read_all(scene, case, root) == RIGHT
    asked = layers_asked(registry, case)
    each = 1 if way == LAZY else 3  # leave, a stream, and a stream after a break
    assert len([seen for seen in asked if not is_range(seen)]) == each * len(case.rows)
    assert len([seen for seen in asked if is_range(seen)]) <= 2 * len(case.rows)


@both_ways
def test_403_to_head_does_not_matter(scene: Scene, registry: FakeRegistry, way: str) -> None:
    case = noisy(f"no head {way}", SIZE)

    def odd() -> None:
        registry.inject(answer_with(403), lambda seen: seen.method == "HEAD")

    with met(scene, registry, case, way, odd) as root:
        assert read_all(scene, case, root) == RIGHT
    assert {seen.method for seen in registry.seen} == {"GET"}


@pytest.fixture
def storage(scene: Scene) -> Iterator[Storage]:
    """Where a registry may redirect to: another host, another port."""
    with scene.registries.another("127.0.0.9") as server:
        yield Storage(server)


@both_ways
def test_a_redirect_to_another_host_gets_no_authorization(
    scene: Scene, registry: FakeRegistry, storage: Storage, way: str
) -> None:
    case = noisy(f"redirects {way}", SIZE)
    TokenGate(registry)
    scene.add(case, storage.server)
    with met(scene, registry, case, way, lambda: storage.serve_for(registry)) as root:
        assert read_all(scene, case, root) == RIGHT
    assert layers_asked(storage.server, case)
    assert not [seen for seen in storage.server.seen if "authorization" in seen.headers]
    given = [seen for seen in layers_asked(registry, case) if "authorization" in seen.headers]
    assert given == layers_asked(registry, case)


@both_ways
def test_a_signature_that_has_expired_is_asked_for_anew_and_no_credential_is_blamed(
    scene: Scene, registry: FakeRegistry, storage: Storage, way: str
) -> None:
    case = noisy(f"expires {way}", 4 * SIZE)
    gate = TokenGate(registry)
    scene.add(case, storage.server)
    count = 0

    def expires(seen: Seen) -> bool:
        """After every eighth request all links so far are worth nothing."""
        nonlocal count
        count += 1
        if count % 8 == 0:
            storage.expire()
        return False

    def odd() -> None:
        storage.serve_for(registry)
        storage.server.inject(answer_with(500), expires)
        if way == FIRST:
            storage.server.inject(cut(BREAK), expired_with, times=1)
        gate.asked.clear()

    def expired_with(seen: Seen) -> bool:
        """The first whole body breaks, and its link is worth nothing by then."""
        if is_whole_layer(seen, case):
            storage.expire()
            return True
        return False

    with met(scene, registry, case, way, odd) as root:
        readers = [
            reader(root / name, sha256_of(case, name), seed)
            for name in sorted(case.rows)
            for seed in range(3)
        ]
        assert [ended_well(process, 30) for process in readers] == [""] * len(readers)
    assert storage.signed > len(case.rows)
    assert len(gate.asked) <= 1, "one for the first pull; what storage refuses costs none"


@both_ways
def test_basic_with_a_colon_in_the_password(scene: Scene, way: str) -> None:
    case = noisy(f"colon {way}", SIZE)
    address, _, port = FILE.partition(":")
    with scene.registries.another(address, int(port)) as registry:
        registry.gate = BasicGate({USER: PASSWORD})
        with met(scene, registry, case, way, lambda: None) as root:
            assert read_all(scene, case, root) == RIGHT
        refused = [seen for seen in registry.seen if "authorization" not in seen.headers]
        assert len(refused) <= 2, "what was let in is sent at once"


@both_ways
def test_429_without_a_time_is_backed_off_from(
    scene: Scene, registry: FakeRegistry, way: str
) -> None:
    case = noisy(f"busy {way}", SIZE)

    def odd() -> None:
        registry.inject(answer_with(429), lambda seen: is_layer(seen, case), 2)

    with met(scene, registry, case, way, odd) as root:
        assert read_all(scene, case, root) == RIGHT


def test_a_blob_that_is_gone_before_a_first_pull_fails_it_by_name(
    scene: Scene, registry: FakeRegistry
) -> None:
    case = noisy("gone at first", SIZE)
    reference = scene.add(case, registry)
    blobs = registry.repositories[case.repository].blobs
    gone = digest(case.contents[0])
    kept = blobs.pop(gone)
    with pytest.raises(grpc.RpcError, match=gone):
        scene.node.pull(reference)
        with scene.node.mounted(case.chain_id):
            pass
    blobs[gone] = kept
    scene.node.pull(reference)
    with scene.node.mounted(case.chain_id) as root:
        assert read_all(scene, case, root) == RIGHT


def test_a_blob_that_is_gone_after_the_first_start_leaves_what_is_here_and_names_the_rest(
    scene: Scene, registry: FakeRegistry
) -> None:
    case = noisy("gone later", SIZE)
    scene.lazily(case, registry)
    first, second = sorted(case.rows)
    blobs = registry.repositories[case.repository].blobs
    with scene.node.mounted(case.chain_id) as root:
        assert ended_well(reader(root / first, sha256_of(case, first))) == ""
        kept = dict(blobs)
        blobs.clear()
        mark = len(scene.node.ember.log())
        assert "Input/output error" in ended_well(reader(root / second, sha256_of(case, second)))
        why = [complaint.why for complaint in scene.complaints(mark)]
        assert why
        assert all("BLOB_UNKNOWN" in each for each in why)
        assert ended_well(reader(root / first, sha256_of(case, first))) == ""
        blobs.update(kept)
        assert scene.node.until(lambda: read_all(scene, case, root) == RIGHT, 20)
