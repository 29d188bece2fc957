"""The whole image brought here: `ember warm`, `ctr pull`, and a bare download of the same bytes.

On a link without a limit and on a slow one. The bare download fetches every layer in ranges and
throws the bytes away: less nobody can do. `ctr pull` unpacks, as `ember warm` leaves files that can
be read; with an index or without one, as said.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bench.bed.bed import drop_page_cache
from bench.bed.debian import science_image
from bench.bed.gobin import CACHE
from bench.bed.link import Shape
from bench.bed.parallel import CONNECTIONS, download
from bench.measure import Case, Figure, Result, Settings, alternate
from bench.progress import Progress
from bench.scene import scene
from bench.trial import Starter

LINK_SHARE = 0.9
# Seconds, where the processor holds both up: three times as fast with an index, twice without.
INDEXED_SHARE, FIRST_SHARE = 1 / 3, 1 / 2


def warm_indexed(starter: Starter) -> float:
    """`ember warm` of an image whose index is here, and nothing else of it."""
    ember = starter.daemon()
    ember.drop_data(starter.image.reference)
    drop_page_cache()
    return ember.warm(starter.image.reference)


def warm_first(starter: Starter) -> float:
    """`ember warm` of an image that this node has never seen; the index is built on the way."""
    ember = starter.daemon()
    ember.remove(starter.image.reference)
    drop_page_cache()
    return ember.warm(starter.image.reference)


def ctr_pull(starter: Starter) -> float:
    drop_page_cache()
    seconds = starter.containerd.pull(starter.image.reference)
    starter.containerd.remove_image(starter.image.reference)
    return seconds


def bare(starter: Starter) -> float:
    drop_page_cache()
    return download(starter.bed.link, starter.image)


WAYS: dict[str, Callable[[Starter], float]] = {
    "bare": bare,
    "ctr pull": ctr_pull,
    "without index": warm_first,
    "with index": warm_indexed,
}


def figures(shape: Shape, values: dict[str, list[float]], size_bytes: int) -> list[Figure]:
    """Of a link without a limit against the others, of a slow one against the link."""
    found = []
    for way, share in (("with index", INDEXED_SHARE), ("without index", FIRST_SHARE)):
        ours = values[way]
        title = f"{shape}: {way}"
        target = None if shape.rate_mbit else share
        found.append(Figure.of(title, "s", ours, values["ctr pull"], target, against="ctr pull"))
        found.append(Figure.of(title, "s", ours, values["bare"], against="bare download"))
        if shape.rate_mbit:
            found.append(
                Figure.of(
                    f"{title}, rate",
                    "Mbit/s",
                    [size_bytes * 8 / 1e6 / seconds for seconds in ours],
                    [shape.rate_mbit],
                    LINK_SHARE,
                    at_least=True,
                    against="the link",
                )
            )
    return found


def run(settings: Settings, say: Progress) -> Result:
    image = science_image(CACHE / "bed", "gzip", say)
    result = Result()
    with scene(settings, image, Shape(0)) as starter:
        with say.step("a first pull: Ember knows the image"):
            starter.first_pull()
            starter.containerd.remove_image(image.reference)
        for shape in (Shape(0), Shape(settings.rate_mbit)):
            starter.bed.link.reshape(shape)
            say(f"link: {shape}")
            ways = {name: partial(way, starter) for name, way in WAYS.items()}
            values = alternate(ways, settings.rounds, say)
            result.raw[str(shape)] = values
            result.figures += figures(shape, values, image.size)
    result.notes.append(
        f"{image.size / 1e6:.0f} MB gzip, {image.plain_size / 1e6:.0f} MB plain; the bare download "
        f"has {CONNECTIONS} connections; the start of the command counts."
    )
    return result


CASE = Case(
    "warm",
    "the whole image brought here, against a pull and against a bare download",
    run,
    "at least 0.9 of a slow link; else 3 times as fast as ctr pull with an index, twice without",
)
