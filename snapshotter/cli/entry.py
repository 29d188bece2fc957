"""Where the `ember` command begins: quiet when it is interrupted while its modules are loaded.

That takes half a second, in which Ctrl-C would be answered by a traceback through libraries.
"""

from __future__ import annotations

import importlib
import signal


def main() -> None:
    """Entry point of the `ember` command."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not under nohup
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    command = importlib.import_module("snapshotter.cli.main")
    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command.main()
