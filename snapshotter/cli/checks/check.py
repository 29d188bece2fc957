"""One line of the doctor, in one of three kinds; only what is not well has a way out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """``result`` is ok, warn (costs laziness or speed) or fail (something is broken)."""

    what: str
    result: str
    found: str
    way_out: str = ""


def well(what: str, found: str) -> Check:
    """Nothing needs to be done."""
    return Check(what, "ok", found)


def weak(what: str, found: str, way_out: str) -> Check:
    """It works, but less well than it could."""
    return Check(what, "warn", found, way_out)


def broken(what: str, found: str, way_out: str) -> Check:
    """It does not work."""
    return Check(what, "fail", found, way_out)


def tried(what: str, passed: bool, found: str, way_out: str) -> Check:
    """Something that only costs laziness or speed where it is missing."""
    return well(what, found) if passed else weak(what, found, way_out)
