"""What cases of growth share: values by way and size, their figures, and the chart of them.

Every size has values of the base from the same run; a ratio never spans two sizes.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from bench.charts import Chart, Point
from bench.measure import Figure, Result

Values = dict[str, list[float]]


@dataclass
class Growth:
    """Values of all ways at each size; ``base`` is the way that the others are compared with.

    ``targets`` has the most that a way's ratio may be, and the size from which on that is asked.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    unit: str
    base: str
    targets: dict[str, tuple[float, float]] = field(default_factory=dict)
    at: dict[float, Values] = field(default_factory=dict)

    def add(self, size: float, values: Values) -> None:
        self.at[size] = values

    def figures(self) -> list[Figure]:
        """Each way against the base, size by size."""
        found = []
        for size, values in self.at.items():
            for way, seen in values.items():
                if way != self.base and seen:
                    target, least = self.targets.get(way, (None, 0.0))
                    found.append(
                        Figure.of(
                            f"{size:,g} {self.x_label}: {way}",
                            self.unit,
                            seen,
                            values[self.base],
                            target if size >= least else None,
                            against=self.base,
                        )
                    )
        return found

    def chart(self) -> Chart:
        lines: dict[str, list[Point]] = {}
        for size, values in self.at.items():
            for way, seen in values.items():
                if seen:
                    point = Point(size, statistics.median(seen), min(seen), max(seen))
                    lines.setdefault(way, []).append(point)
        return Chart(self.name, self.title, self.x_label, self.y_label, lines)

    def into(self, result: Result) -> None:
        """Put figures, chart and every value into a result."""
        result.figures += self.figures()
        result.charts.append(self.chart())
        result.raw[self.name] = {f"{size:g}": values for size, values in self.at.items()}
