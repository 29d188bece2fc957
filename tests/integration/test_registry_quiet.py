"""The whole daemon and a registry that asks to be left alone: Retry-After in all its forms.

A time that makes sense is kept by all readers together; one that makes none is as good as no time
and costs no reader an error; an absurd one is bounded by what readers wait.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from email.utils import formatdate

import pytest

from tests.cases.images import ImageCase
from tests.fakes.http_server import Answer, Seen
from tests.fakes.registry import Change, FakeRegistry, answer_with, is_blob
from tests.integration.registry_scene import MISS_S, Scene, noisy, read_all, scene_in
from tests.readers import ended_well, reader, sha256_of

pytestmark = [pytest.mark.root, pytest.mark.containerd]

LIMIT_S = 0.75 * MISS_S
QUIET_S = 2


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene_in(tmp_path_factory.mktemp("quiet")) as made:
        yield made


@pytest.fixture
def registry(scene: Scene) -> Iterator[FakeRegistry]:
    """One of its own for each test: quiet is kept by place."""
    with scene.registries.another() as made:
        yield made


def in_seconds(seen: Seen, answer: Answer) -> Answer:
    return answer_with(429, ("Retry-After", str(QUIET_S)))(seen, answer)


def by_date(seen: Seen, answer: Answer) -> Answer:
    """A date has whole seconds: this one lies between one and two quiet times from now."""
    when = formatdate(time.time() + QUIET_S + 1, usegmt=True)
    return answer_with(503, ("Retry-After", when))(seen, answer)


def by_a_clock_that_is_wrong(seen: Seen, answer: Answer) -> Answer:
    """The registry's clock is a day ahead, and it says so."""
    now_s = time.time() + 86400
    dates = ("Date", formatdate(now_s, usegmt=True))
    when = formatdate(now_s + QUIET_S, usegmt=True)
    return answer_with(429, dates, ("Retry-After", when))(seen, answer)


@pytest.mark.parametrize("quiet", [in_seconds, by_date, by_a_clock_that_is_wrong])
def test_quiet_is_kept_by_all_readers_and_ends_when_it_was_said_to(
    scene: Scene, registry: FakeRegistry, quiet: Change
) -> None:
    case = noisy(f"quiet {quiet.__name__}", 1_000_000)
    scene.lazily(case, registry)
    registry.inject(quiet, is_blob, times=1)
    first, second = sorted(case.rows)
    began_s = time.monotonic()
    with scene.node.mounted(case.chain_id) as root:
        early = reader(root / first, sha256_of(case, first))
        assert scene.node.until(lambda: bool(registry.seen), 5)
        others = [reader(root / second, sha256_of(case, second), seed) for seed in range(3)]
        assert scene.node.until(lambda: len(registry.seen) > 1, MISS_S)
        assert time.monotonic() - began_s > QUIET_S - 0.1
        assert [ended_well(process) for process in (early, *others)] == [""] * 4


SENSELESS = ["0", "-5", "soon", "1.5", "1e9", "", "Thu, 01 Jan 1970 00:00:00 GMT", "0x10"]


@pytest.mark.parametrize("status", [429, 503])
def test_a_time_without_sense_costs_no_reader_an_error(
    scene: Scene, registry: FakeRegistry, status: int
) -> None:
    case = noisy(f"senseless {status}", 2_000_000)
    scene.lazily(case, registry)
    for text in SENSELESS:
        registry.inject(answer_with(status, ("Retry-After", text)), is_blob, times=1)
    with scene.node.mounted(case.chain_id) as root:
        assert read_all(scene, case, root) == ["", ""]


ABSURD = {
    "seconds": "99999999999",
    "many digits": "9" * 400,
    "date": "Fri, 31 Dec 9999 23:59:59 GMT",
}


@pytest.mark.parametrize("form", ABSURD)
def test_an_absurd_time_is_bounded_and_what_waits_for_it_goes_on(
    scene: Scene, registry: FakeRegistry, form: str
) -> None:
    case = noisy(f"absurd {form}", 50_000)
    reference = scene.add(case, registry)
    registry.inject(answer_with(429, ("Retry-After", ABSURD[form])), times=1)
    began_s = time.monotonic()
    assert scene.node.pull(reference).layers == 2
    assert LIMIT_S - 0.1 < time.monotonic() - began_s < 2 * MISS_S


def test_a_read_under_an_absurd_time_asks_once_more_before_it_fails_by_name(
    scene: Scene, registry: FakeRegistry
) -> None:
    case = noisy("absurd read")
    reference = scene.lazily(case, registry)
    registry.inject(answer_with(503, ("Retry-After", ABSURD["date"])), is_blob)
    mark = len(scene.node.ember.log())
    began_s = time.monotonic()
    with scene.node.mounted(case.chain_id) as root:
        assert all("Input/output error" in said for said in read_all(scene, case, root))
        assert time.monotonic() - began_s < 2.5 * MISS_S
        assert 2 <= len(registry.seen) <= storm(case)
        told = [each.why for each in scene.complaints(mark)]
        assert told
        assert all("503" in why or "asked for quiet" in why for why in told), told
        troubles = [layer["trouble"] for layer in scene.node.image(reference)["layers"]]
        assert all("503" in trouble or "asked for quiet" in trouble for trouble in troubles)
        registry.heal()
        assert scene.node.until(lambda: read_all(scene, case, root) == ["", ""], 20)


def storm(case: ImageCase) -> int:
    """More requests than this while two views can't be had are too many."""
    return 5 * len(case.rows)


def test_too_many_requests_without_a_time_are_answered_by_fewer(
    scene: Scene, registry: FakeRegistry
) -> None:
    case = noisy("no time", 1_000_000)
    scene.lazily(case, registry)
    registry.inject(answer_with(429), is_blob)
    with scene.node.mounted(case.chain_id) as root:
        readers = [
            reader(root / name, sha256_of(case, name), seed)
            for name in sorted(case.rows)
            for seed in range(4)
        ]
        assert all("Input/output error" in ended_well(process) for process in readers)
        assert 2 <= len(registry.seen) <= 2 * storm(case)  # a fetch from each place to begin asks
        registry.heal()
        assert scene.node.until(lambda: read_all(scene, case, root) == ["", ""], 40)
