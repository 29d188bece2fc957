"""How a client tells what the daemon said from what gRPC says of a daemon that is not there.

Both arrive as a code and a text, and both may be UNAVAILABLE: the daemon's own carry a mark.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

MARK = (("ember-said", "1"),)


def is_the_daemons_own(trailing: Iterable[Any] | None) -> bool:
    """Whether an error that came with this trailing metadata was written by the daemon."""
    return any(tuple(pair) == MARK[0] for pair in trailing or ())
