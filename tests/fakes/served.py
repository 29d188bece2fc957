"""A registry of the tests in a thread of its own, for commands that run a loop themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.cases.images import OCI, ImageCase
from tests.fakes.loop import loop_in_a_thread
from tests.fakes.registry import FakeRegistry


@contextlib.contextmanager
def in_a_thread(registry: FakeRegistry) -> Iterator[None]:
    """Serve for the length of a block."""
    with loop_in_a_thread() as wait_for:
        wait_for(registry.start())
        try:
            yield
        finally:
            wait_for(registry.stop())


def offered(registry: FakeRegistry, case: ImageCase, tag: str = "1") -> str:
    """Have the image in the registry; its reference."""
    for content in case.contents:
        registry.add_blob(case.repository, content)
    for number, document in enumerate(case.documents):
        last = number == len(case.documents) - 1
        kind = f"{OCI}.index.v1+json" if b'"manifests"' in document else f"{OCI}.manifest.v1+json"
        registry.add_manifest(case.repository, document, kind, tag if last else None)
    return f"{registry.authority}/{case.repository}:{tag}"
