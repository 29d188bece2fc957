"""A first pull of which nothing comes is named while it lasts, and again when it goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from snapshotter.content import BlobRef, Digest
from snapshotter.imagefs import quiet
from snapshotter.imagefs.ingest import Ingest
from snapshotter.imagefs.rates import Rates
from tests.fakes.registry import sha256
from tests.fakes.skipping_clock import SkippingClock
from tests.unit.imagefs.parts import Staged

CONTENT = bytes(4_000_000)  # a tar that ends at once
BLOB = BlobRef("r.example/app", sha256(CONTENT), len(CONTENT))


class Stalling:
    """Half of a blob, and the rest when it is let go on."""

    def __init__(self) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def stream(self, blob: BlobRef) -> AsyncIterator[bytes]:
        self.begun.set()
        yield CONTENT[: len(CONTENT) // 2]
        await self.go_on.wait()
        yield CONTENT[len(CONTENT) // 2 :]

    def suspect(self, blob: BlobRef) -> None: ...


async def stage(view: Digest, at_least_bytes: int) -> Staged:
    return Staged()


async def refuse(blob: Digest, diff_id: Digest, reason: str) -> None:
    raise AssertionError(reason)


async def test_a_stream_that_stalls_is_named_with_its_repository_and_again_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(quiet, "LONG_S", 0.05)
    caplog.set_level(logging.INFO)
    clock, streams = SkippingClock(), Stalling()
    named = f"layer {BLOB.digest} of r.example/app"
    with ThreadPoolExecutor(2) as pool:
        rates = Rates(1000, clock)
        ingest = Ingest(
            streams, stage, tmp_path, refuse, pool, clock, parallel=1, rates=rates, received=len_of
        )
        job = ingest.start(BLOB, sha256(CONTENT))
        async with asyncio.timeout(10):
            while f"{named}: nothing has come for" not in caplog.text:
                assert not job.finished.is_set()
                await asyncio.sleep(0)
        assert job.quiet_s >= 0.05
        assert caplog.text.count("nothing has come") == 1  # what follows may be slow again
        streams.go_on.set()
        assert await ingest.wait(job, 10)
        assert f"{named}: it goes on" in caplog.text
        await ingest.close()


def len_of(count: int) -> int:
    return count


async def test_who_waits_for_its_turn_is_not_called_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quiet, "LONG_S", 0.0)
    streams, clock = Stalling(), SkippingClock()
    with ThreadPoolExecutor(2) as pool:
        rates = Rates(1000, clock)
        ingest = Ingest(
            streams, stage, tmp_path, refuse, pool, clock, parallel=1, rates=rates, received=len_of
        )
        first = ingest.start(BLOB, sha256(CONTENT))
        second = ingest.start(BlobRef("r.example/app", sha256(b"2"), 1), sha256(b"2"))
        async with asyncio.timeout(10):
            await streams.begun.wait()
        assert first.quiet is not None
        assert second.quiet is None and second.quiet_s == 0.0
        await ingest.close()
