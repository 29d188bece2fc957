"""The composition root: the one place where parts are built and joined, and nothing else happens.

`root` shows the order of everything, `opening` how each part is made from the configuration.
"""

from __future__ import annotations

from snapshotter.daemon.root import Daemon

__all__ = ["Daemon"]
