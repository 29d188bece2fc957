"""WWW-Authenticate: what a registry says it wants to see. Pure.

Grammar: RFC 9110, 11.6.1: several challenges may share one header, several headers may come, and
a parameter is a token or a quoted string. What can't be read is skipped, never guessed at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_PARAMETER = re.compile(rf'({_TOKEN})\s*=\s*(?:"((?:[^"\\]|\\.)*)"|({_TOKEN}))', re.ASCII)
_SCHEME = re.compile(rf"({_TOKEN})(?:\s+|$)", re.ASCII)
_LIMIT = 8 * 1024


@dataclass(frozen=True, slots=True)
class Challenge:
    """``scheme`` in lower case (``bearer``, ``basic``); the parameters of a bearer one."""

    scheme: str
    realm: str = ""
    service: str = ""
    scope: str = ""


def parse_challenges(values: Iterable[str]) -> list[Challenge]:
    """Every challenge in the header's values, in order."""
    found: list[Challenge] = []
    for value in values:
        found += _parse(value[:_LIMIT])
    return found


def _parse(text: str) -> list[Challenge]:
    found: list[Challenge] = []
    position = 0
    while position < len(text):
        if text[position] in ", \t":
            position += 1
            continue
        scheme = _SCHEME.match(text, position)
        if scheme is None:
            break
        position = scheme.end()
        parameters: dict[str, str] = {}
        while (match := _PARAMETER.match(text, position)) is not None:
            quoted = match[2]
            value = match[3] if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
            parameters.setdefault(match[1].lower(), value)
            position = match.end()
            comma = re.compile(r"\s*,\s*").match(text, position)
            if comma is None:
                break
            position = comma.end()
        found.append(
            Challenge(
                scheme[1].lower(),
                parameters.get("realm", ""),
                parameters.get("service", ""),
                parameters.get("scope", ""),
            )
        )
    return found


def choose(challenges: Iterable[Challenge]) -> Challenge | None:
    """The challenge to meet: bearer with a realm before basic, None if it is neither."""
    usable = [c for c in challenges if c.scheme == "basic" or (c.scheme == "bearer" and c.realm)]
    return min(usable, key=lambda c: c.scheme != "bearer", default=None)
