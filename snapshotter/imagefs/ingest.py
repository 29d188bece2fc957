"""First pulls: a layer without an index is streamed once, verified, indexed, and its view kept.

One job for each blob, whoever asks. Nothing of a layer can be read before its job has seen both
digests come out right; a job that fails leaves no trace but its reason, and may be started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

from snapshotter.chunks.offload import offload
from snapshotter.chunks.space import is_full
from snapshotter.clock import Clock
from snapshotter.content import BlobRef, Digest
from snapshotter.errors import (
    CorruptError,
    EmberError,
    NoSpaceError,
    RefusedError,
    UnavailableError,
    restated,
)
from snapshotter.image.feeding import feed
from snapshotter.image.indexer import LayerIndexer
from snapshotter.imagefs.ingest_job import Job, Staging, Streams
from snapshotter.imagefs.quiet import Quiet
from snapshotter.imagefs.rates import Rates
from snapshotter.tasks import end_all

log = logging.getLogger(__name__)

FINISHED_JOBS = 4096
RETRY_WAITS_S = (0.5, 2.0, 8.0)
PATIENCE_S = 60.0
"""A registry that asks for more quiet than this gets it: the first pull fails, and says so."""


Source = Callable[[BlobRef], AsyncIterator[bytes]]


class Ingest:
    """Streams layers side by side, ``parallel`` of each registry at once; others wait."""

    def __init__(
        self,
        streams: Streams,
        stage: Callable[[Digest, int], Awaitable[Staging]],
        index_directory: Path,
        on_refused: Callable[[Digest, Digest, str], Coroutine[None, None, None]],
        executor: Executor,
        clock: Clock,
        parallel: int,
        rates: Rates,
        received: Callable[[int], object],
    ) -> None:
        """``received`` is told of all bytes that came from registries, also of what failed."""
        self._streams = streams
        self._stage = stage
        self._directory = index_directory
        self._on_refused = on_refused
        self._executor = executor
        self._clock = clock
        self._parallel = parallel
        self._slots = WeakValueDictionary[str, asyncio.Semaphore]()
        self._rates = rates
        self._received = received
        self._jobs: dict[tuple[Digest, Digest], Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._streamed: dict[Digest, int] = {}
        self.on_indexed: Callable[[Digest], object] = _nobody
        """Told of each layer that this node has built the index of, before anybody else is."""

    def running(self, blob: Digest, diff_id: Digest) -> bool:
        """True while the layer is on its way or waits for its turn."""
        job = self._jobs.get((blob, diff_id))
        return job is not None and not job.finished.is_set()

    def job(self, blob: Digest, diff_id: Digest) -> Job | None:
        """The last job of the layer, running or ended."""
        return self._jobs.get((blob, diff_id))

    def jobs(self) -> list[Job]:
        """All jobs that have not ended."""
        return [job for job in self._jobs.values() if not job.finished.is_set()]

    def rate(self, registry: str) -> float:
        """Compressed bytes a second that streams from ``registry`` have reached lately."""
        return self._rates.of(registry)

    def streamed_bytes(self, diff_id: Digest) -> int:
        """Compressed bytes that first pulls of this view have brought since the daemon's start."""
        return self._streamed.get(diff_id, 0)

    def forget_streamed(self, diff_id: Digest) -> None:
        """What first pulls have brought of this view is gone."""
        self._streamed.pop(diff_id, None)

    def start(self, blob: BlobRef, diff_id: Digest) -> Job:
        """Begin to stream ``blob``, or join the job that does already.

        UnavailableError once this is closed.
        """
        return self._begin(blob, diff_id, None, keep=True, lasting=True)

    @contextlib.asynccontextmanager
    async def wanted(self, blob: BlobRef, diff_id: Digest) -> AsyncIterator[Job]:
        """As `start`, for as long as the block lasts: nobody else may want it."""
        job = self._begin(blob, diff_id, None, keep=True, lasting=False)
        job.wanted += 1
        try:
            yield job
        finally:
            job.wanted -= 1
            if not (job.wanted or job.lasting or job.finished.is_set()) and job.task is not None:
                job.task.cancel()

    def start_index(self, blob: BlobRef, diff_id: Digest) -> Job:
        """As `start`, but only its index is kept."""
        return self._begin(blob, diff_id, None, keep=False, lasting=True)

    def start_from(
        self,
        blob: BlobRef,
        diff_id: Digest,
        source: Source,
    ) -> Job:
        """Index ``blob`` from bytes that are on this node already; its view is not kept."""
        return self._begin(blob, diff_id, source, keep=False, lasting=True)

    def _begin(
        self,
        blob: BlobRef,
        diff_id: Digest,
        source: Source | None,
        keep: bool,
        lasting: bool,
    ) -> Job:
        key = (blob.digest, diff_id)
        known = self._jobs.get(key)
        ending = None
        if known is not None and not known.finished.is_set():
            if known.task is None or not known.task.cancelling():
                known.lasting = known.lasting or lasting
                return known
            ending = known  # nobody wanted it any more: both would write the same index
        if self._closed:
            raise _stopping(blob)
        while len(self._jobs) >= FINISHED_JOBS:
            ended = next((d for d, j in self._jobs.items() if j.finished.is_set()), None)
            if ended is None:
                break
            del self._jobs[ended]
        job = Job(blob, diff_id, self._clock.monotonic_s(), lasting=lasting)
        self._jobs[key] = job
        work = self._run(job, source, keep, ending)
        job.task = task = asyncio.create_task(work, name=f"ingest {blob.digest}")
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, job))
        return job

    def _ended(self, job: Job, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        job.task = None
        if not job.finished.is_set():  # cancelled before its first step
            job.error = _stopping(job.blob)
            job.finished.set()

    async def wait(self, job: Job, wait_s: float) -> bool:
        """True if ``job`` ended well within ``wait_s``; its error is raised if it failed."""
        try:
            async with asyncio.timeout(wait_s):
                await job.finished.wait()
        except TimeoutError:
            return False
        if job.error is not None:
            raise restated(job.error)
        return True

    async def close(self) -> None:
        """Cancel what runs, and let those who wait know at once; what they ask from now on fails.

        It starts anew when the next daemon is asked for it.
        """
        self._closed = True
        await end_all(self._tasks)
        for job in self.jobs():
            job.error = _stopping(job.blob)
            job.finished.set()

    async def _run(
        self, job: Job, source: Source | None, keep: bool, ending: Job | None = None
    ) -> None:
        try:
            if ending is not None:
                await ending.finished.wait()
            async with self._slots_of(job.blob.repository):
                with Quiet(f"layer {job.blob.digest} of {job.blob.repository}") as job.quiet:
                    await self._try(job, source, keep)
        except (RefusedError, CorruptError) as error:
            job.error = restated(error)
            log.error("layer %s is refused: %s", job.blob.digest, error)
            if isinstance(error, RefusedError):
                await self._on_refused(job.blob.digest, job.diff_id, str(error))
        except EmberError as error:
            job.error = restated(error)
            log.error("layer %s could not be indexed: %s", job.blob.digest, error)
        except OSError as error:
            kind = NoSpaceError if is_full(error) else UnavailableError
            job.error = kind(f"indexing layer {job.blob.digest}: {error}")
            log.error("%s", job.error)
        except asyncio.CancelledError:
            job.error = _stopping(job.blob)
            raise
        except Exception as error:
            job.error = EmberError(f"indexing layer {job.blob.digest} failed: {error!r}")
            log.exception("indexing layer %s failed", job.blob.digest)
        finally:
            job.finished.set()

    def _slots_of(self, repository: str) -> asyncio.Semaphore:
        """Those of a registry: one that hangs holds up its own layers only. Gone when unused."""
        registry = repository.partition("/")[0]
        return self._slots.setdefault(registry, asyncio.Semaphore(self._parallel))

    async def _try(self, job: Job, source: Source | None, keep: bool) -> None:
        """Again after a fault that may pass, a bounded number of times and with rising waits.

        A stream that could not be taken up where it broke off may come whole, from its start.
        """
        for wait_s in (*RETRY_WAITS_S, None):
            try:
                if source is None:
                    await self._stream(job, keep)
                else:
                    await self._ingest(job, source, None, _uncounted)
            except (UnavailableError, CorruptError) as error:
                if isinstance(error, CorruptError):
                    self._streams.suspect(job.blob)
                asked_s = getattr(error, "retry_after_s", None) or 0.0
                again = error.retryable or job.begun
                if wait_s is None or not again or asked_s > PATIENCE_S:
                    raise
                log.warning("layer %s: %s; tried again", job.blob.digest, error)
                if error.retryable:
                    await self._clock.sleep(max(wait_s, asked_s))
                job.done_bytes, job.begun = 0, False
            else:
                return

    async def _stream(self, job: Job, keep: bool) -> None:
        registry = job.blob.repository.split("/", 1)[0]
        with self._rates.streaming(registry) as measure:

            def came(count_bytes: int) -> None:
                measure(count_bytes)
                self._received(count_bytes)

            staging = await self._stage(job.diff_id, job.blob.size_bytes) if keep else None
            await self._ingest(job, self._streams.stream, staging, came)
        if keep:
            self._note_streamed(job)

    async def _ingest(
        self,
        job: Job,
        source: Source,
        staging: Staging | None,
        came: Callable[[int], None],
    ) -> None:
        indexer = LayerIndexer(
            job.blob.digest,
            job.diff_id,
            blob_bytes=job.blob.size_bytes,
            sink=staging.sink if staging is not None else None,
            directory=self._directory,
        )
        try:
            async with contextlib.aclosing(self._parts(job, source, came)) as parts:
                await feed(indexer, parts, self._executor, job.taken)
            index = await offload(self._executor, indexer.finish)
            self.on_indexed(job.blob.digest)
            if staging is not None:
                await staging.seal(index)
        except BaseException:
            # First the view, so that the indexer's helper has nowhere to write any more.
            if staging is not None:
                await asyncio.shield(staging.discard())
            await offload(self._executor, indexer.close)
            raise

    async def _parts(
        self, job: Job, source: Source, came: Callable[[int], None]
    ) -> AsyncGenerator[bytes, None]:
        """What comes, noted as it does."""
        async for part in source(job.blob):
            came(len(part))
            job.begun = True
            if job.quiet is not None:
                job.quiet.came()
            yield part

    def _note_streamed(self, job: Job) -> None:
        while len(self._streamed) >= FINISHED_JOBS:
            self._streamed.pop(next(iter(self._streamed)))
        before = self._streamed.get(job.diff_id, 0)
        self._streamed[job.diff_id] = before + job.blob.size_bytes


def _nobody(blob: Digest) -> None:
    """Nobody wants to know."""


def _uncounted(count_bytes: int) -> None:
    """Bytes that were on this node already."""


def _stopping(blob: BlobRef) -> UnavailableError:
    return UnavailableError(
        f"layer {blob.digest} is not indexed yet, and this daemon is stopping; ask again when it"
        " is back"
    )
