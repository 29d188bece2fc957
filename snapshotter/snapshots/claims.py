"""Asks the lazy side about a layer, once for all clients that ask at the same time.

A claim never makes a pull fail: an error, a late answer or labels that can't be read mean "unpack
it", and the log says why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from snapshotter.content import Digest
from snapshotter.errors import EmberError, InvalidArgumentError
from snapshotter.snapshots import labels as known
from snapshotter.snapshots.lazy import LayerClaim, LazyLayer, LazyLayers, StackEntry

_log = logging.getLogger(__name__)


class Claims:
    """Claims under way, by chainID and parent; each ends within ``wait_s`` seconds."""

    def __init__(self, lazy: LazyLayers, wait_s: float) -> None:
        self._lazy = lazy
        self._wait_s = wait_s
        self._asked: dict[tuple[str, str, str], asyncio.Task[LazyLayer | None]] = {}

    async def ask(
        self,
        namespace: str,
        chain_id: str,
        parent: str,
        labels: Mapping[str, str],
        below: Sequence[StackEntry],
        being_unpacked: bool,
    ) -> LazyLayer | None:
        """The lazy layer for this chainID on this parent, or None: unpack it."""
        key = (namespace, chain_id, parent)
        task = self._asked.get(key)
        if task is None:
            claim = layer_claim(namespace, chain_id, parent, labels, below, being_unpacked)
            task = asyncio.get_running_loop().create_task(self._decide(claim))
            self._asked[key] = task
            task.add_done_callback(lambda _: self._asked.pop(key, None))
        return await asyncio.shield(task)

    async def _decide(self, claim: LayerClaim) -> LazyLayer | None:
        try:
            async with asyncio.timeout(self._wait_s):
                return await self._lazy.claim(claim)
        except TimeoutError:
            _log.warning("layer %s: no decision in %s s, unpacked", claim.chain_id, self._wait_s)
        except EmberError as error:
            _log.warning("layer %s is unpacked: %s", claim.chain_id, error)
        except Exception:
            _log.exception("layer %s is unpacked: deciding on it failed", claim.chain_id)
        return None


def layer_claim(
    namespace: str,
    chain_id: str,
    parent: str,
    labels: Mapping[str, str],
    below: Sequence[StackEntry],
    being_unpacked: bool,
) -> LayerClaim:
    """Read the labels of a layer's Prepare; what isn't a digest counts as absent."""
    image_layers = labels.get(known.IMAGE_LAYERS, "").split(",")
    return LayerClaim(
        namespace=namespace,
        chain_id=chain_id,
        parent=parent,
        image_ref=labels.get(known.IMAGE_REF),
        manifest_digest=_digest(labels.get(known.MANIFEST_DIGEST)),
        layer_digest=_digest(labels.get(known.LAYER_DIGEST)),
        image_layers=tuple(d for text in image_layers if (d := _digest(text)) is not None),
        diff_id=_digest(labels.get(known.DIFF_ID)),
        below=tuple(below),
        labels=dict(labels),
        being_unpacked=being_unpacked,
    )


def _digest(text: str | None) -> Digest | None:
    if not text:
        return None
    try:
        return Digest.parse(text)
    except InvalidArgumentError:
        return None
