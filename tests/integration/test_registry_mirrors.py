"""The whole daemon behind mirrors of hosts.toml that are gone, silent, empty or lying.

Whatever a mirror does, the image is lazy and reads right, the registry is asked instead, and the
mirror is not asked again for each read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.containers import build_program, container, crc_of, reading_image
from tests.fakes.http_server import Answer, Seen
from tests.fakes.registry import (
    Change,
    FakeRegistry,
    When,
    answer_with,
    cut,
    flip,
    header,
    is_blob,
    is_range,
)
from tests.integration.registry_scene import Scene, noisy, read_all, scene_in
from tests.readers import ended_well, reader, sha256_of

pytestmark = [pytest.mark.root, pytest.mark.containerd]

READERS = 2
"""Of each file: what is told of a mirror by one read must count for the others on their way."""
MIRROR_ASKED = 4 * READERS
"""How often a mirror may be asked while both files are read by all of them."""
SIZE = 3_000_000
"""Of each file, for some dozens of misses."""


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certs.d")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, certs: Path) -> Iterator[Scene]:
    with scene_in(tmp_path_factory.mktemp("mirrors"), lambda _: f'hosts_dir = "{certs}"\n') as made:
        yield made


Mirrored = tuple[FakeRegistry, FakeRegistry]


@pytest.fixture
def mirrored(scene: Scene, certs: Path) -> Iterator[Mirrored]:
    """A registry, and the mirror that is to be asked first."""
    with scene.registries.another() as registry, scene.registries.another() as mirror:
        folder = certs / registry.authority
        folder.mkdir()
        (folder / "hosts.toml").write_text(
            f'server = "{registry.url}"\n'
            f'[host."{mirror.url}"]\ncapabilities = ["pull", "resolve"]\n'
        )
        yield registry, mirror


def page(seen: Seen, answer: Answer) -> Answer:
    """What a captive portal says to everything."""
    return Answer(200, [("Content-Type", "text/html")], b"<html>Please log in</html>")


def longer(seen: Seen, answer: Answer) -> Answer:
    """A body, and a Content-Length, of one byte more than the Content-Range says."""
    answer.body += b"!"
    return answer


def promising(seen: Seen, answer: Answer) -> Answer:
    """A Content-Length that is right and a body that stays behind it."""
    answer.cut_after = len(answer.body) // 2
    return answer


def anything(seen: Seen) -> bool:
    return True


FAULTS: dict[str, tuple[Change, When]] = {
    "a page in place of everything": (page, anything),
    "wrong bytes": (flip(100), is_blob),
    "a range that lies": (header("Content-Range", "bytes 0-9/10"), is_range),
    "a range of another blob": (header("Content-Range", "bytes 0-9/9"), is_range),
    "a length that lies": (longer, is_range),
    "a length that is not kept": (promising, is_blob),
    "silence": (cut(-1, "hang"), anything),
    "silence in mid-body": (cut(100, "hang"), is_blob),
    "closed connections": (cut(-1), anything),
    "nothing of it": (answer_with(404), anything),
    "no blobs of it": (answer_with(404), is_blob),
    "no credentials": (answer_with(401), anything),
    "no leave": (answer_with(403), anything),
    "its own failure": (answer_with(500), anything),
    "no gateway": (answer_with(502), is_blob),
    "far too many requests": (answer_with(429, ("Retry-After", "99999999999")), anything),
    "a redirect to itself for ever": (
        lambda seen, answer: Answer(307, [("Location", seen.target)]),
        is_blob,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mirror_that_is_of_no_use_costs_a_few_requests_and_no_reader_an_error(
    scene: Scene, mirrored: Mirrored, fault: str
) -> None:
    registry, mirror = mirrored
    case = noisy("mirror with " + fault, SIZE)
    reference = scene.add(case, registry)
    scene.add(case, mirror)
    change, when = FAULTS[fault]
    mirror.inject(change, when)
    scene.pull_index(reference, case)
    mirror.seen.clear()
    registry.seen.clear()
    with scene.node.mounted(case.chain_id) as root:
        readers = [
            reader(root / name, sha256_of(case, name), seed)
            for name in sorted(case.rows)
            for seed in range(READERS)
        ]
        assert [ended_well(process, 20) for process in readers] == [""] * len(readers)
    assert len(registry.seen) > 3 * MIRROR_ASKED
    assert len(mirror.seen) <= MIRROR_ASKED, [seen.target for seen in mirror.seen]


def test_a_mirror_that_is_not_there_is_passed_over(scene: Scene, mirrored: Mirrored) -> None:
    registry, mirror = mirrored
    scene.registries.do(mirror.stop())
    case = noisy("mirror that is down")
    scene.lazily(case, registry)
    with scene.node.mounted(case.chain_id) as root:
        assert read_all(scene, case, root) == ["", ""]


def test_a_mirror_that_goes_bad_under_a_mounted_image_is_left(
    scene: Scene, mirrored: Mirrored
) -> None:
    registry, mirror = mirrored
    case = noisy("mirror that goes bad")
    reference = scene.add(case, registry)
    scene.add(case, mirror)
    scene.pull_index(reference, case)
    first, second = sorted(case.rows)
    registry.seen.clear()
    with scene.node.mounted(case.chain_id) as root:
        assert ended_well(reader(root / first, sha256_of(case, first))) == ""
        assert not registry.seen, "the mirror has it all"
        mirror.inject(flip(100), is_blob)
        assert ended_well(reader(root / second, sha256_of(case, second))) == ""
        assert registry.asked("/blobs/")


BAD: list[Callable[[Scene, FakeRegistry], None]] = [
    lambda scene, mirror: mirror.inject(page, anything),
    lambda scene, mirror: mirror.inject(flip(100), is_blob),
    lambda scene, mirror: mirror.inject(answer_with(404), anything),
    lambda scene, mirror: mirror.inject(cut(-1, "hang"), anything),
    lambda scene, mirror: scene.registries.do(mirror.stop()),
]


def test_a_container_starts_lazily_and_reads_right_behind_every_bad_mirror(
    scene: Scene, certs: Path, tmp_path: Path
) -> None:
    program = build_program(tmp_path)
    for n, spoil in enumerate(BAD):
        with scene.registries.another() as registry, scene.registries.another() as mirror:
            folder = certs / registry.authority
            folder.mkdir()
            (folder / "hosts.toml").write_text(f'[host."{mirror.url}"]\n')
            case = reading_image(program, f"behind mirror {n}", count=1)
            reference = scene.add(case, registry)
            scene.add(case, mirror)
            spoil(scene, mirror)
            scene.pull_index(reference, case)
            with container(scene.node, reference) as running:
                assert running.read("f0") == crc_of(f"behind mirror {n}", 0)
