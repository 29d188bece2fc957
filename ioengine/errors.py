"""One door from C's negative errno to Python: every native call goes through check()."""

from __future__ import annotations

import os


def check(result: int, doing: str) -> int:
    """Return ``result`` if it is not negative, else raise OSError(-result) saying what was done."""
    if result < 0:
        raise OSError(-result, f"{doing}: {os.strerror(-result)}")
    return result
