"""A CI user with a registry: what the tests of `ember index` work with."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.cases.images import (
    ImageCase,
    as_it_is,
    gzipped,
    image,
    zstandarded,
)
from tests.cases.tars import file, layer
from tests.fakes.writable import WritableRegistry
from tests.unit.cli.conftest import Place

DATA = b"".join(random.Random(n).randbytes(90) + bytes(100) for n in range(8000))
BASE = gzipped(layer(file(b"base", DATA)))
OWN = zstandarded(layer(file(b"own", DATA[:100_000])))
PLAIN = as_it_is(layer(file(b"plain", b"x" * 3000)))
CASE = image("indexed", [BASE, OWN, PLAIN])
OTHER = image("other", [BASE, gzipped(layer(file(b"more", b"y" * 5000)))])


class Ci:
    """A CI user: a home of its own, a registry, a key."""

    def __init__(self, place: Place, registry: WritableRegistry) -> None:
        self._place = place
        self.registry = registry
        self.home = place.directory / "home"
        self.home.mkdir()
        self.key = place.directory / "key"
        assert self.ember("keygen", str(self.key)).exit_code == 0

    @property
    def public(self) -> str:
        return f"{self.key}.pub"

    @property
    def cache(self) -> Path:
        return self.home / ".cache" / "ember" / "index"

    @property
    def environment(self) -> dict[str, str]:
        return {"HOME": str(self.home), "XDG_CACHE_HOME": ""}

    def ember(self, *words: str, **environment: str) -> Any:
        return self._place.ember("index", *words, **self.environment, **environment)

    def told(self, *words: str) -> Any:
        """The JSON of a command that must succeed."""
        result = self.ember(*words, "--json")
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    def build(self, reference: str, *words: str) -> Any:
        """The only image that is built, signed."""
        (row,) = self.told("build", reference, "--sign", str(self.key), *words)["images"]
        return row

    def ways(self, row: Any) -> list[str]:
        return [one["how"] for one in row["layers"]]

    def blobs_read(self, case: ImageCase) -> list[str]:
        """Which layers of the image were asked for."""
        got = [seen.target for seen in self.registry.seen if seen.method == "GET"]
        return [name for name in case.stored if any(name in target for target in got)]
