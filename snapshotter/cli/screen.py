"""What people read: numbers in words, tables, one place that knows the terminal.

Text that comes from images or from the daemon is never taken for markup. Each thing stays on one
line, however narrow the terminal: a name that is broken in two cannot be searched for or copied.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text


def console() -> Console:
    """Stdout, with colours where it is a terminal that wants them."""
    return Console(soft_wrap=True, highlight=False, markup=False, emoji=False)


def size(count: float) -> str:
    """Bytes for people: ``1.5 GB``; powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def share(here: int, whole: int) -> str:
    """How much of something is here, in percent; 100 only when all of it is."""
    if whole == 0:
        return "–"
    return "100 %" if here >= whole else f"{min(99, 100 * here // whole)} %"


def several(count: int, thing: str) -> str:
    """``1 layer``, ``2 layers``."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Text:
    """Columns side by side, two blanks between them, and none at the end of a line."""
    widths = [max(map(cell_len, cells)) for cells in zip(columns, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (set_cell_size(cell, width) for cell, width in zip(cells, widths, strict=True))
        return "  ".join(padded).rstrip()

    return Text("\n").join([Text(line(columns), style="bold"), *(Text(line(r)) for r in rows)])
