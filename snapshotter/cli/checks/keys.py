"""Whether the keys can be used by which indexes of others are trusted, and ours are signed."""

from __future__ import annotations

from collections.abc import Iterator

from snapshotter.cli.checks.check import Check, tried, well
from snapshotter.config import Config
from snapshotter.errors import ConfigError
from snapshotter.indexes.keys import TrustedKeys, load_signing_key


def keys(config: Config) -> Iterator[Check]:
    """What the daemon would say in its status and its log once it needs them."""
    ring = TrustedKeys(config.index.trusted_keys).read()
    found = f"{len(ring.keys)} in {config.index.trusted_keys}"
    if ring.problems:
        found = "; ".join(ring.problems)
    way_out = "such a key counts for nothing: mend it or take it away"
    yield tried("trusted keys", not ring.problems, found, way_out)
    path = config.index.sign_key
    if path is None:
        return
    try:
        yield well("signing key", f"{path}, {load_signing_key(path).key_id}")
    except ConfigError as error:
        way_out = "what this node built is not pushed: mend it or unset index.sign_key"
        yield tried("signing key", False, str(error), way_out)
