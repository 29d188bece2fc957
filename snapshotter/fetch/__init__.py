"""The road: "have these bytes of this view here, verified". The only way that chunks arrive.

asked → join the work under way → choose a tier → fetch → verify → write → wake every waiter.
Kernel misses, background completion, peers and model loaders all take it.
"""

from __future__ import annotations

from snapshotter.fetch.limits import RoadLimits
from snapshotter.fetch.road import Road
from snapshotter.fetch.sources import LayerSource, Sources
from snapshotter.fetch.spread import SpreadStreams
from snapshotter.fetch.tally import Tally

__all__ = ["LayerSource", "Road", "RoadLimits", "Sources", "SpreadStreams", "Tally"]
