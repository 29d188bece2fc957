"""Progress of a long run on stderr: what is being done, for how long, and how much came in.

On a terminal the line under way is live; elsewhere each line is printed once, when it is known.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.text import Text


class Progress:
    """Call it to say a line; ``step`` shows one that goes on for a while."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._start = time.monotonic()

    def __call__(self, text: str) -> None:
        elapsed_s = time.monotonic() - self._start
        self._console.print(Text.assemble((f"{elapsed_s:5.0f} s  ", "dim"), text))

    @contextlib.contextmanager
    def step(self, text: str, came_bytes: Callable[[], int] = lambda: 0) -> Iterator[None]:
        """Show ``text`` while the block runs, with the bytes that came since its start."""
        if not self._console.is_terminal:
            self(text)
            yield
            return
        with self._console.status(Live(text, came_bytes)):
            yield


class Live:
    """A line that is computed anew each time that it is drawn."""

    def __init__(self, text: str, came_bytes: Callable[[], int]) -> None:
        self._text = text
        self._start = time.monotonic()
        self._came_bytes = came_bytes
        self._before = came_bytes()

    def __rich__(self) -> Text:
        came = self._came_bytes() - self._before
        said = f"{self._text}  {time.monotonic() - self._start:.0f} s"
        return Text(f"{said}, {came / 1e6:.1f} MB" if came else said)
