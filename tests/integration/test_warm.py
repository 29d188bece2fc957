"""`ember warm` on a whole node: what it brings is right, enough, and kept for a later pull."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from snapshotter.rpc.pb.ember.control.v1 import control_pb2
from tests.cases.images import ImageCase
from tests.cases.odd import gzip_streams
from tests.cases.refused_images import refused_images
from tests.fakes.hostile import resets_bodies
from tests.fakes.http_server import Answer, Seen
from tests.fakes.registry import Change, answer_with, is_range
from tests.integration.registry_scene import Scene, noisy, read_all, scene_in
from tests.integration.test_full_disk import MIB, lower, small_node
from tests.readers import ended_well, reader, sha256_of
from tests.readers import noisy as noisy_on_the_bed
from tests.treecheck import compare, directory_sizes

pytestmark = [pytest.mark.root, pytest.mark.containerd]

TOO_LARGE = 48 * MIB
STOPPED_S = 4.0
AGAIN = 1.2 * MIB
"""What lies between a checkpoint and the first chunk that is missing, in what does not pack."""
GZIP_REFUSED = [case for case in refused_images() if case.name.startswith("gzip")]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene_in(tmp_path_factory.mktemp("warm")) as made:
        yield made


@pytest.fixture(autouse=True)
def healed(scene: Scene) -> Iterator[None]:
    yield
    scene.registry.heal()
    scene.registry.seen.clear()


def is_layer(case: ImageCase) -> Callable[[Seen], bool]:
    """Whether a request is for a layer of the image."""
    return lambda seen: any(digest in seen.path for digest in case.stored)


def sizes(case: ImageCase) -> int:
    """Stored bytes of the layers."""
    return sum(len(data) for data in case.contents[:2])


def test_what_was_warmed_without_an_index_is_pulled_and_read_without_a_byte_of_its_layers(
    scene: Scene,
) -> None:
    case = noisy("warmed first")
    reference = scene.add(case)
    last = scene.node.warm(reference)
    assert [layer.state for layer in last.layers] == ["here", "here"]
    assert sum(layer.fetched_bytes for layer in last.layers) == sizes(case)
    assert scene.node.image(reference)["namespaces"] == []
    scene.registry.seen.clear()
    scene.registry.inject(answer_with(503), is_layer(case))
    assert scene.node.pull(reference).lazy_layers == 2
    with scene.node.mounted(case.chain_id) as root:
        assert read_all(scene, case, root) == ["", ""]
    assert not [seen for seen in scene.registry.seen if is_layer(case)(seen)]


def test_what_was_warmed_with_an_index_comes_in_ranges_and_again_not_at_all(scene: Scene) -> None:
    case = noisy("warmed again", 10_000_000)
    reference = scene.lazily(case)
    last = scene.node.warm(reference)
    assert sum(layer.fetched_bytes for layer in last.layers) < 1.01 * sizes(case)
    assert [seen for seen in scene.registry.seen if is_range(seen)]
    again = scene.node.warm(reference)
    assert sum(layer.fetched_bytes for layer in again.layers) == 0
    with scene.node.mounted(case.chain_id) as root:
        assert read_all(scene, case, root) == ["", ""]


def fetched(last: control_pb2.WarmProgress) -> int:
    return sum(layer.fetched_bytes for layer in last.layers)


def sent_of(scene: Scene, case: ImageCase) -> int:
    """How often a layer of the image was sent as a whole."""
    seen = filter(is_layer(case), scene.registry.seen)
    return len([one for one in seen if one.method == "GET" and not is_range(one)])


@pytest.mark.parametrize("case", gzip_streams(), ids=lambda case: case.name)
def test_gzip_that_hardly_anybody_writes_is_warmed_whole_and_by_ranges(
    scene: Scene, case: ImageCase
) -> None:
    reference = scene.add(case)
    scene.node.warm(reference)
    scene.node.pull(reference)
    for _ in ("first", "by ranges"):
        shown = scene.node.shown(case.chain_id)
        assert compare(case.rows, shown, (directory_sizes,)) == []
        assert scene.node.until(lambda: not scene.node.drop(reference).kept, 10)
        scene.node.warm(reference)


@pytest.mark.parametrize("case", GZIP_REFUSED, ids=lambda case: case.name)
def test_gzip_that_is_wrong_is_refused_by_name(scene: Scene, case: ImageCase) -> None:
    reference = scene.add(case)
    for _ in ("first", "again"):
        assert case.refused in lower(lambda: scene.node.warm(reference))
    assert not scene.node.image(reference)["lazy"]


def test_after_a_kill_only_what_is_missing_is_fetched(scene: Scene) -> None:
    case = noisy("killed", 6_000_000)
    reference = scene.lazily(case)
    scene.registry.inject(*throttled(2_000_000, case))
    killed = scene.node.warming(reference)
    with pytest.raises(grpc.RpcError):
        for state in killed:
            if fetched(state) > 3_000_000:
                scene.node.ember.kill()
    scene.node.start_again()
    here = scene.node.image(reference)["here_bytes"]
    assert here > 1_000_000
    scene.registry.heal()
    last = scene.node.warm(reference)
    assert fetched(last) < sizes(case) - here + AGAIN
    with scene.node.mounted(case.chain_id) as root:
        assert read_all(scene, case, root) == ["", ""]


def test_a_stop_does_not_wait_for_it_and_says_so(scene: Scene) -> None:
    case, indexed = noisy("stopped first", 6_000_000), noisy("stopped by ranges", 6_000_000)
    for reference in (scene.add(case), scene.lazily(indexed)):
        scene.registry.inject(*throttled(500_000, case))
        scene.registry.inject(*throttled(500_000, indexed))
        warming = scene.node.warming(reference)
        assert next(state for state in warming if fetched(state) > 100_000)
        began_s = time.monotonic()
        scene.node.ember.stop()
        assert time.monotonic() - began_s < STOPPED_S
        with pytest.raises(grpc.RpcError, match="stopping"):
            list(warming)
        scene.node.start_again()
        scene.registry.heal()
    assert "Traceback" not in scene.log_since(0)


def throttled(bytes_per_s: int, case: ImageCase) -> tuple[Change, Callable[[Seen], bool]]:
    """A fault: layers of the image come slowly."""

    def change(seen: Seen, answer: Answer) -> Answer:
        answer.drip_bytes, answer.drip_delay_s = bytes_per_s // 50, 0.02
        return answer

    return change, is_layer(case)


def test_two_at_once_share_the_work(scene: Scene) -> None:
    case = noisy("twice", 3_000_000)
    reference = scene.add(case)
    scene.registry.inject(*throttled(6_000_000, case))
    with ThreadPoolExecutor(2) as both:
        done = list(both.map(lambda _: scene.node.warm(reference), range(2)))
    assert all(last.done for last in done)
    assert sent_of(scene, case) == 2


def test_who_hangs_up_ends_it_and_what_has_come_stays(scene: Scene) -> None:
    case = noisy("hung up", 6_000_000)
    reference = scene.lazily(case)
    scene.registry.inject(*throttled(1_000_000, case))
    warming = scene.node.warming(reference)
    for state in warming:
        if fetched(state) > 2_000_000:
            break
    warming.close()
    before = scene.node.image(reference)["here_bytes"]
    assert before > 500_000
    scene.registry.heal()
    assert fetched(scene.node.warm(reference)) < sizes(case) - before + AGAIN


def test_a_reader_meanwhile_is_served_first(scene: Scene) -> None:
    read, warmed = noisy("read first", 300_000), noisy("warmed behind", 8_000_000)
    reference, other = scene.lazily(read), scene.lazily(warmed)
    scene.node.pull(reference)
    scene.registry.inject(*throttled(1_000_000, warmed))
    warming = scene.node.warming(other)
    assert next(state for state in warming if fetched(state) > 100_000)
    with scene.node.mounted(read.chain_id) as root:
        assert read_all(scene, read, root, 10) == ["", ""]
    scene.registry.heal()
    assert not scene.node.image(other)["here_bytes"] >= sizes(warmed)
    warming.close()


def test_a_registry_that_breaks_bodies_costs_little_more(scene: Scene) -> None:
    case = noisy("broken bodies", 6_000_000)
    reference = scene.lazily(case)
    resets_bodies(3, 1_000_000)(scene.registry)
    last = scene.node.warm(reference)
    assert fetched(last) < 1.5 * sizes(case)
    with scene.node.mounted(case.chain_id) as root:
        assert read_all(scene, case, root) == ["", ""]


def test_what_is_not_there_and_what_is_not_given_is_said(scene: Scene) -> None:
    case = noisy("not given")
    reference = scene.add(case)
    assert "answered 404" in lower(
        lambda: scene.node.warm(reference.replace("not-given", "absent"))
    )
    scene.registry.inject(answer_with(401, ("WWW-Authenticate", 'Basic realm="closed"')))
    assert "answered 401" in lower(lambda: scene.node.warm(reference))


def test_an_image_that_is_removed_while_it_comes_is_gone_afterwards(scene: Scene) -> None:
    case = noisy("removed", 6_000_000)
    reference = scene.lazily(case)
    scene.registry.inject(*throttled(1_000_000, case))
    warming = scene.node.warming(reference)
    assert next(state for state in warming if fetched(state) > 500_000)
    scene.node.containerd.remove_image(reference)
    scene.node.containerd.collect_garbage()
    scene.node.remove(reference)
    with pytest.raises(grpc.RpcError, match="removed meanwhile"):
        list(warming)


def test_a_disk_that_is_too_small_is_named_and_what_fits_is_used(tmp_path: Path) -> None:
    large, small = noisy_on_the_bed("large", size=TOO_LARGE), noisy_on_the_bed("small")
    with small_node(tmp_path) as (at, disk):
        for case in (large, small):
            case.push(at.bed.registry)
        assert "no space" in lower(lambda: at.warm(large.reference))
        assert list((disk.root / "staging").iterdir()) == []
        assert at.warm(small.reference).done
        at.pull(small.reference)
        with at.mounted(small.chain_id) as root:
            for name in small.rows:
                assert ended_well(reader(root / name, sha256_of(small, name))) == ""
        assert "Traceback" not in at.ember.log()
