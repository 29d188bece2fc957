"""A registry of the tests in a thread of its own, for commands that run a loop themselves."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from tests.cases.images import OCI, ImageCase
from tests.fakes.registry import FakeRegistry
from tests.fakes.writable import WritableRegistry


@contextlib.contextmanager
def in_a_thread(registry: FakeRegistry) -> Iterator[None]:
    """Serve for the length of a block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(registry.start(), loop).result(10)
        yield
        asyncio.run_coroutine_threadsafe(registry.stop(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def offered(registry: WritableRegistry, case: ImageCase, tag: str = "1") -> str:
    """Have the image in the registry; its reference."""
    for content in case.contents:
        registry.add_blob(case.repository, content)
    for number, document in enumerate(case.documents):
        last = number == len(case.documents) - 1
        kind = f"{OCI}.index.v1+json" if b'"manifests"' in document else f"{OCI}.manifest.v1+json"
        registry.add_manifest(case.repository, document, kind, tag if last else None)
    return f"{registry.authority}/{case.repository}:{tag}"
