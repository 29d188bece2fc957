"""Durations as Go programs write them in configuration files (``1h30m``, ``1.5s``). Pure."""

from __future__ import annotations

import re

_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)


def parse_duration_s(text: str) -> float:
    """Seconds of a non-negative duration; ValueError if it is not one."""
    if text == "0":
        return 0.0
    position, total = 0, 0.0
    while position < len(text):
        match = _PART.match(text, position)
        if match is None:
            break
        total += float(match[1]) * _SECONDS[match[2]]
        position = match.end()
    if not text or position != len(text):
        raise ValueError(f"{text[:60]!r} is not a duration such as 1h30m or 5s")
    return total
