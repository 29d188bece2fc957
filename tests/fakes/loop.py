"""An event loop in a thread, for what must answer a caller that blocks in this very process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

LIMIT_S = 10.0


@contextlib.contextmanager
def loop_in_a_thread() -> Iterator[Callable[[Coroutine[Any, Any, object]], object]]:
    """What runs a coroutine on the loop and waits for its end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="loop of a fake", daemon=True)
    thread.start()
    try:
        yield lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(LIMIT_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(LIMIT_S)
        loop.close()
