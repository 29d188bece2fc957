"""`ember serve` that ends itself with SIGKILL at a named place, and knows nothing of it.

``python -m tests.fakes.dying VERB PLACE EVENT serve …``: once the function VERB was entered, the
first EVENT (call or return) of the function PLACE is the last thing that happens. Both are
qualified names, as ``Snapshotter.remove``; the profiler sees them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

from snapshotter.cli.main import main


class Death:
    """Waits for the verb, then for the place."""

    def __init__(self, verb: str, place: str, event: str) -> None:
        self._verb = verb
        self._place = place
        self._event = event
        self._armed = False

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_qualname
        if self._armed and event == self._event and name == self._place:
            os.kill(os.getpid(), signal.SIGKILL)
        if event == "call" and name == self._verb:
            self._armed = True


if __name__ == "__main__":
    death = Death(*sys.argv[1:4])
    del sys.argv[1:4]
    threading.setprofile(death.profile)
    sys.setprofile(death.profile)
    main()
