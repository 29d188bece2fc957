"""Runs of chunks on their way to the disk: no buffer is lost, however their transfer ends."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from snapshotter.fetch.runs import Runs
from snapshotter.fetch.tally import Ledger
from snapshotter.image.decode import Decoder, plan
from tests.unit.fetch.conftest import Bench

PLAIN = bytes(range(256)) * 200


async def test_a_write_that_never_began_gives_its_buffer_back(bench: Bench) -> None:
    view_id = bench.layers.add(PLAIN, PLAIN, bench.tiers)
    await bench.read(view_id, 0, 1)
    view = bench.store.get(view_id)
    assert view is not None
    (source,) = bench.layers.of_view(view_id)
    (span,) = plan(source.index, range(source.index.chunk_count))
    decoder = Decoder(source.index, span)
    pool = bench.engine.buffers()
    with ThreadPoolExecutor(1) as threads:
        runs = Runs(view, threads, Ledger(bench.metrics), lambda number: None)
        runs.add([PLAIN])
        await runs.step(decoder)
        assert pool.free_count < pool.count
        await runs.drop(decoder)  # in the same turn of the loop
    assert pool.free_count == pool.count
