"""What people read: numbers in words, tables, one place that knows the terminal.

Text that comes from images or from the daemon is never taken for markup. What goes to a pipe has
no colours and is not folded: each thing stays on its line.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

_PIPE_COLUMNS = 10_000


def console() -> Console:
    """Stdout: as wide as the terminal, and without an end where it is none."""
    made = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    if not made.is_terminal:
        made.width = _PIPE_COLUMNS
    return made


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


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table without lines; what is too wide for a terminal goes on below, nothing is cut off."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made
