"""A bed with one image pushed, a containerd and an Ember that runs: where most cases begin."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from bench.bed.bed import Bed
from bench.bed.containerd import Containerd
from bench.bed.ember import Ember
from bench.bed.image import Image
from bench.bed.link import Shape
from bench.measure import Settings
from bench.trial import Starter

Sections = Mapping[str, Mapping[str, object]]


@contextlib.contextmanager
def scene(
    settings: Settings, image: Image, shape: Shape, sections: Sections | None = None
) -> Iterator[Starter]:
    """Start everything; ``sections`` are tables of Ember's configuration that are not as usual."""
    with Bed(shape) as bed:
        image.push(bed.registry)
        containerd, ember = snapshotters(bed, settings, sections)
        yield Starter(bed, containerd, ember, image)


def snapshotters(
    bed: Bed, settings: Settings, sections: Sections | None = None
) -> tuple[Containerd, Ember]:
    """A containerd and an Ember in a bed, both running."""
    ember = bed.ember(settings.containerd)
    ember.configure(completion=False, sections=sections)
    containerd = bed.containerd(
        settings.containerd, ember_socket=ember.socket, ember_root=ember.root
    )
    ember.start()
    return containerd, ember
