"""What a measurement is made of: a case, its figures, and the rule that ways take turns.

A figure always has what it is compared with, from the same run: absolute rates of a virtual machine
move by a factor of two within minutes, ratios of neighbours do not. Raw values are kept, so that a
median can be doubted.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from bench.bed.bed import file_system
from bench.charts import Chart
from bench.progress import Progress


@dataclass(frozen=True)
class Settings:
    """How much to measure; ``quick`` shows that a case works and is worth nothing as a result.

    ``points`` are what a case that grows is measured at; empty: the case's own choice.
    """

    rounds: int = 3
    quick: bool = False
    rate_mbit: float = 200.0
    delay_ms: float = 0.0
    containerd: int = 2
    points: tuple[float, ...] = ()

    def steps(self, usual: Sequence[float], quick: Sequence[float]) -> list[float]:
        """Where a case that grows is measured, smallest first."""
        return sorted(self.points or (quick if self.quick else usual))


@dataclass(frozen=True)
class Figure:
    """One line of a result: ours, theirs, and what the design asks of the ratio ours / theirs.

    ``target`` is the bound; it is a least one with ``at_least``, else a most. None: just shown.
    ``spread`` and ``theirs_spread`` are the least and the most that was seen, where ``ours`` and
    ``theirs`` are medians.
    """

    name: str
    unit: str
    ours: float
    theirs: float | None = None
    target: float | None = None
    at_least: bool = False
    against: str = ""
    spread: tuple[float, float] | None = None
    theirs_spread: tuple[float, float] | None = None

    @classmethod
    def of(
        cls,
        name: str,
        unit: str,
        ours: Sequence[float],
        theirs: Sequence[float] = (),
        target: float | None = None,
        *,
        at_least: bool = False,
        against: str = "",
    ) -> Self:
        """The figure of values of several rounds: their medians, and how far they lie apart."""
        return cls(
            name,
            unit,
            statistics.median(ours),
            statistics.median(theirs) if theirs else None,
            target,
            at_least,
            against,
            spread_of(ours),
            spread_of(theirs),
        )

    @property
    def ratio(self) -> float | None:
        return self.ours / self.theirs if self.theirs else None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one (a figure with no base is its own ratio)."""
        if self.target is None:
            return None
        value = self.ours if self.ratio is None else self.ratio
        return value >= self.target if self.at_least else value <= self.target

    def document(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "ours": self.ours,
            "theirs": self.theirs,
            "against": self.against,
            "spread": self.spread,
            "theirs_spread": self.theirs_spread,
            "ratio": self.ratio,
            "target": self.target,
            "at_least": self.at_least,
            "met": self.met,
        }

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Self:
        """The figure that ``document`` wrote."""
        given = {key: value for key, value in row.items() if key not in ("ratio", "met")}
        for key in ("spread", "theirs_spread"):
            given[key] = tuple(given[key]) if given[key] else None
        return cls(**given)


def spread_of(values: Sequence[float]) -> tuple[float, float] | None:
    """The least and the most of several values; None where there is no several."""
    return (min(values), max(values)) if len(values) > 1 else None


@dataclass
class Result:
    """What a case found; ``raw`` has every single value, ``charts`` what grows with what."""

    figures: list[Figure] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """One measurement: its name on the command line, what it shows, and how it is made.

    ``target`` says in words what is asked; ``large`` ones are run only when they are named.
    """

    name: str
    shows: str
    run: Callable[[Settings, Progress], Result]
    target: str = "none"
    large: bool = False


def alternate(
    ways: Mapping[str, Callable[[], float]], rounds: int, say: Progress
) -> dict[str, list[float]]:
    """Measure all ways in every round, each second round in reverse order; values by way."""
    values: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        order = list(ways) if number % 2 == 0 else list(ways)[::-1]
        for name in order:
            with say.step(f"{name}, round {number + 1} of {rounds}"):
                values[name].append(ways[name]())
    return values


def medians(values: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(found) for name, found in values.items()}


def percentile(values: list[float], share: float) -> float:
    """The value below which ``share`` (0..1) of ``values`` lie; the nearest one that was seen."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def machine() -> dict[str, Any]:
    """The machine that a result is from, as far as it matters."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": processor(),
        "kernel": platform.release().partition("-")[0],
        "cpus": os.cpu_count(),
        "memory_bytes": memory,
        "file_system": file_system(Path("/var/tmp")),
        "python": platform.python_version(),
    }


def processor() -> str:
    """What /proc/cpuinfo calls the first processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
