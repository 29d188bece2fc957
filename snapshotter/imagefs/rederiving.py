"""Comparing an index with its view in a process of its own, behind everything else on the node.

A thread of low priority would hold the interpreter's lock while others run before it, and with it
the whole daemon. The process is bounded in memory; it ends with the daemon that wanted it.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
from pathlib import Path

from snapshotter.errors import UnavailableError
from snapshotter.image.apart import give_way
from snapshotter.image.child import run_child
from snapshotter.image.index import LayerIndex
from snapshotter.image.limits import ScanLimits
from snapshotter.imagefs.rederive import AbandonedError, Verdict, compare

_LOWEST = 19
_MEMORY_BYTES = 1024 * 1024 * 1024
_MEMORY_FACTOR = 48
_ENTRY_BYTES = 3 * 1024
_TAR_BLOCK = 512
_TEXT_FACTOR = 3
_GONE = 3


async def compare_apart(index: Path, view: Path) -> Verdict:
    """As rederive.compare. UnavailableError: it could not be done, or not to its end."""
    try:
        limit_bytes = memory_bytes(index, view)
    except FileNotFoundError:
        raise UnavailableError(f"{view} went while it was looked at") from None
    order = json.dumps([str(index), str(view), limit_bytes])
    status, said = await run_child(__name__, order, what=str(index))
    if status == _GONE:
        raise UnavailableError(f"{view} went while it was read")
    if status != 0:
        raise UnavailableError(f"comparing {index} ended with status {status}; tried again later")
    bytes_right, fault = json.loads(said)
    return Verdict(bool(bytes_right), str(fault))


def memory_bytes(index: Path, view: Path) -> int:
    """What a comparison may take: enough for the layer with the most and longest names that a scan
    lets pass, as far as the view has room for them. The index alone may say less than there is."""
    limits, view_bytes = ScanLimits(), view.stat().st_size
    entries = min(limits.inodes, view_bytes // _TAR_BLOCK)
    text = _TEXT_FACTOR * min(limits.text_bytes, view_bytes)
    return _MEMORY_BYTES + _MEMORY_FACTOR * index.stat().st_size + _ENTRY_BYTES * entries + text


def main(text: str) -> int:
    """The other process: its exit status, the verdict on stdout."""
    index, view, limit_bytes = json.loads(text)
    give_way()
    os.nice(_LOWEST)
    gc.disable()  # nothing of a tree goes before its end
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    try:
        verdict = compare(LayerIndex.open(Path(index), verify=False), Path(view))
    except (AbandonedError, FileNotFoundError):
        return _GONE
    json.dump([verdict.bytes_right, verdict.fault], sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
