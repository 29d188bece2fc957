"""Bytes sent before ready, against the compressed bytes of the chunks that the start touched.

Which those are is found from outside (bench/touched.py), not from what was fetched; a span is what
has to be fetched for a chunk, from the checkpoint that it is inflated from. What is sent besides
the image's own bytes (manifest, headers, checkpoint windows) counts as sent.
"""

from __future__ import annotations

from bench.bed.debian import science_image
from bench.bed.gobin import CACHE
from bench.bed.link import Shape
from bench.measure import Case, Figure, Result, Settings
from bench.mounted import mounted
from bench.progress import Progress
from bench.scene import scene
from bench.touched import Touched, touched
from bench.trial import Starter
from snapshotter.content import Digest
from snapshotter.image.decode import plan
from snapshotter.image.index import LayerIndex

TARGET = 1.3


def index_of(starter: Starter, layer: int) -> LayerIndex:
    digest = Digest.parse(starter.image.layers[layer].digest)
    return LayerIndex.open(starter.daemon().root / "index" / f"{digest.hex}.idx", layer=digest)


def compressed_bytes(starter: Starter, what: Touched) -> tuple[int, int, int]:
    """(chunks, their own compressed bytes, bytes of the spans that give them)."""
    amount = own = spans = 0
    for layer in what.ranges:
        index = index_of(starter, layer)
        chunks = what.chunks(layer, index.chunk_bytes)
        amount += len(chunks)
        own += sum(
            index.chunk_input_end(c) - (index.chunk_input_end(c - 1) if c else 0) for c in chunks
        )
        spans += sum(span.length_bytes for span in plan(index, chunks))
    return amount, own, spans


def run(settings: Settings, say: Progress) -> Result:
    image = science_image(CACHE / "bed", "gzip", say)
    result = Result()
    sent: list[float] = []
    spans: list[float] = []
    owns: list[float] = []
    amounts: list[float] = []
    with scene(settings, image, Shape(settings.rate_mbit, settings.delay_ms)) as starter:
        with say.step("first pull: the index comes here"):
            starter.first_pull()
        for number in range(settings.rounds):
            with say.step(f"a cold start, round {number + 1} of {settings.rounds}"):
                trial = starter.index_cold()
            with (
                say.step("which pages it touched"),
                mounted(starter.containerd, image.reference, "ember") as root,
            ):
                what = touched(root, image)
            amount, own, span = compressed_bytes(starter, what)
            sent.append(trial.fetched_bytes / 1e6)
            spans.append(span / 1e6)
            owns.append(own / 1e6)
            amounts.append(amount)
            result.raw[f"round {number + 1}"] = {
                "sent_bytes": trial.fetched_bytes,
                "touched_plain_bytes": what.plain_bytes,
                "touched_chunks": amount,
                "own_bytes": own,
                "span_bytes": span,
                "files": len(what.files),
            }
    result.figures = [
        Figure.of("sent before ready", "MB", sent, spans, TARGET, against="spans of the chunks"),
        Figure.of("sent before ready, strictly", "MB", sent, owns, against="the chunks alone"),
        Figure.of("chunks touched", "", amounts),
    ]
    result.notes.append(
        "A span reaches from the checkpoint before a chunk to the chunk's end: gzip gives no less."
    )
    return result


CASE = Case(
    "sent",
    "bytes sent before ready against the compressed bytes of the chunks touched",
    run,
    "at most 1.3 of the spans that give the chunks",
)
