"""A process for the tests of child.py: says its argument in pieces, or does as it is told."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def main(text: str) -> int:
    word, _, rest = text.partition(" ")
    if word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "wait":
        Path(rest).write_text(str(os.getpid()), encoding="ascii")
        signal.pause()
    for line in text.splitlines(keepends=True):
        sys.stdout.write(line)
        sys.stdout.flush()
    return 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
