"""Charts as SVG text: lines that grow with something, and bars of ratios against their targets.

Pure: values in, text out. No script, no font file, no style sheet: a chart is readable wherever an
SVG is shown, on a light ground of its own. Whoever reads it can hover a point for its value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 76, 168, 44, 52
BAR_PX, NAME_PX, VALUE_PX = 22, 250, 60
# Told apart by colour-blind readers too (Okabe and Ito); the first is ours.
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
INK, FAINT, GROUND = "#222222", "#dddddd", "#ffffff"
TICKS = 5


@dataclass(frozen=True)
class Point:
    """One value and, where there were several, the least and the most of them."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Chart:
    """Lines over one axis; ``name`` is the file's. A logarithmic axis cannot show 0 or less."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: dict[str, list[Point]] = field(default_factory=dict)
    log_x: bool = True
    log_y: bool = True


@dataclass(frozen=True)
class Bar:
    """A ratio, 1 being what it is compared with; ``target`` is drawn as a stroke across it."""

    name: str
    ratio: float
    target: float | None = None
    met: bool | None = None


def short(value: float) -> str:
    """A number for an axis: three digits, thousands as k, millions as M."""
    for bound, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= bound:
            return f"{value / bound:.3g}{letter}"
    return f"{value:.3g}"


def ticks(low: float, high: float, *, logarithmic: bool) -> list[float]:
    """Round numbers from at most ``low`` to at least ``high``; decades on a logarithmic axis."""
    if logarithmic:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        return [10.0**power for power in range(first, max(last, first + 1) + 1)]
    span = (high - low) or abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(span / TICKS))
    step *= next(factor for factor in (1, 2, 5, 10) if step * factor * TICKS >= span)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [step * number for number in range(first, max(last, first + 1) + 1)]


def scale(
    marks: Sequence[float], start: float, end: float, *, log: bool
) -> Callable[[float], float]:
    """From values to pixels: the first mark at ``start``, the last at ``end``."""
    turn = math.log10 if log else float
    low, high = turn(marks[0]), turn(marks[-1])
    return lambda value: start + (end - start) * (turn(value) - low) / ((high - low) or 1.0)


def text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text {place} fill="{INK}">{escape(words)}</text>'


def stroke(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'


def document(width: int, height: int, parts: Sequence[str], title: str) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
    rows = [
        f'{head} width="{width}" height="{height}" font-family="sans-serif" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="{GROUND}"/>',
        text(12, 24, title, size=15),
        *parts,
        "</svg>",
    ]
    return "\n".join(rows) + "\n"


def line_chart(chart: Chart) -> str:
    """The chart as SVG; ValueError where it has no point or one that its axis cannot show."""
    points = [point for line in chart.lines.values() for point in line]
    if not points:
        raise ValueError(f"{chart.name}: no point to draw")
    heights = [value for p in points for value in (p.y, p.low, p.high) if value is not None]
    if (chart.log_y and min(heights) <= 0) or (chart.log_x and min(p.x for p in points) <= 0):
        raise ValueError(f"{chart.name}: a logarithmic axis has no place for 0 or less")
    x_marks = ticks(min(p.x for p in points), max(p.x for p in points), logarithmic=chart.log_x)
    y_marks = ticks(
        min(heights) if chart.log_y else min(0.0, *heights), max(heights), logarithmic=chart.log_y
    )
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    across = scale(x_marks, LEFT, right, log=chart.log_x)
    down = scale(y_marks, bottom, TOP, log=chart.log_y)
    parts = []
    for mark in x_marks:
        parts.append(stroke(across(mark), TOP, across(mark), bottom, FAINT))
        parts.append(text(across(mark), bottom + 18, short(mark), anchor="middle"))
    for mark in y_marks:
        parts.append(stroke(LEFT, down(mark), right, down(mark), FAINT))
        parts.append(text(LEFT - 8, down(mark) + 4, short(mark), anchor="end"))
    parts.append(text((LEFT + right) / 2, HEIGHT - 12, chart.x_label, anchor="middle"))
    parts.append(text(12, TOP - 6, chart.y_label))
    for number, (name, line) in enumerate(chart.lines.items()):
        parts += drawn(name, line, COLOURS[number % len(COLOURS)], across, down)
        row = TOP + 14 + 20 * number
        parts.append(stroke(right + 12, row - 4, right + 32, row - 4, COLOURS[number % 6], 3))
        parts.append(text(right + 38, row, name))
    return document(WIDTH, HEIGHT, parts, chart.title)


def drawn(
    name: str,
    line: Sequence[Point],
    colour: str,
    across: Callable[[float], float],
    down: Callable[[float], float],
) -> list[str]:
    """One line: its path, its points, and a whisker from the least to the most of each."""
    ordered = sorted(line, key=lambda point: point.x)
    path = " ".join(f"{across(p.x):.1f},{down(p.y):.1f}" for p in ordered)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for p in ordered:
        if p.low is not None and p.high is not None:
            parts.append(stroke(across(p.x), down(p.low), across(p.x), down(p.high), colour))
        said = escape(f"{name}: {short(p.y)} at {short(p.x)}")
        place = f'cx="{across(p.x):.1f}" cy="{down(p.y):.1f}" r="3.5"'
        parts.append(f'<circle {place} fill="{colour}"><title>{said}</title></circle>')
    return parts


def ratio_chart(title: str, bars: Sequence[Bar]) -> str:
    """Ratios as bars from 0, a stroke at 1 and one at each target; missed ones are darker."""
    if not bars:
        raise ValueError(f"{title}: no ratio to draw")
    most = max(max(bar.ratio, bar.target or 0.0, 1.0) for bar in bars)
    marks = ticks(0.0, most, logarithmic=False)
    height = TOP + BAR_PX * len(bars) + BOTTOM
    bottom = height - BOTTOM + 8
    across = scale(marks, NAME_PX, WIDTH - VALUE_PX, log=False)
    parts = []
    for mark in marks:
        parts.append(stroke(across(mark), TOP, across(mark), bottom, FAINT))
        parts.append(text(across(mark), bottom + 16, short(mark), anchor="middle"))
    for number, bar in enumerate(bars):
        top = TOP + BAR_PX * number
        colour = COLOURS[0] if bar.met is False else COLOURS[1]
        place = f'x="{NAME_PX}" y="{top + 4}" height="{BAR_PX - 8}"'
        parts.append(
            f'<rect {place} width="{across(bar.ratio) - NAME_PX:.1f}" fill="{colour}">'
            f"<title>{escape(f'{bar.name}: {bar.ratio:.3g}')}</title></rect>"
        )
        if bar.target is not None:
            at = across(bar.target)
            parts.append(stroke(at, top + 1, at, top + BAR_PX - 1, INK, 2))
        parts.append(text(NAME_PX - 8, top + 16, bar.name, anchor="end"))
        parts.append(text(across(bar.ratio) + 6, top + 16, f"{bar.ratio:.3g}"))
    parts.append(stroke(across(1.0), TOP, across(1.0), bottom, INK))
    parts.append(text(NAME_PX, height - 8, "ratio; strokes: targets; orange: missed", size=11))
    return document(WIDTH, height, parts, title)
