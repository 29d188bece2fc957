"""Adopts one index file: in whichever thread calls it, or as a process of its own (``-m``).

The process starts quickly, for it loads little of what the daemon does: it knows no event loop. It
says why not on stdout, and what kind of why by its exit status.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from snapshotter.content import Digest
from snapshotter.errors import NoSpaceError, RefusedError
from snapshotter.image.adoption import Claim, adopt
from snapshotter.image.apart import give_way
from snapshotter.image.index import LayerIndex
from snapshotter.image.index_writer import replace_index

TIMEOUT_S = 120.0
REFUSED, FULL, FAILED = 3, 4, 5
SAID_BYTES = 16 * 1024


def adopt_in_place(path: Path, claim: Claim) -> None:
    """As adopting.adopt_file(), at once and here."""
    index = LayerIndex.open(path)
    adopted = adopt(index.data, claim, where=str(path))
    if adopted is not index.data:
        replace_index(path, adopted)


@dataclass(frozen=True, slots=True)
class Order:
    """What the other process is told, as JSON in its only argument."""

    path: Path
    claim: Claim
    memory_bytes: int

    def encode(self) -> str:
        claim = self.claim
        numbers = [claim.blob_bytes, claim.windows_bytes, claim.chunk_bytes, self.memory_bytes]
        return json.dumps([str(self.path), str(claim.layer), str(claim.diff_id), *numbers])

    @classmethod
    def decode(cls, text: str) -> Order:
        path, layer, diff_id, blob, windows, chunk, memory_bytes = json.loads(text)
        claim = Claim(Digest.parse(layer), Digest.parse(diff_id), blob, windows, chunk)
        return cls(Path(path), claim, memory_bytes)


def main(text: str) -> int:
    """The other process: its exit status, the fault on stdout."""
    order = Order.decode(text)
    give_way()
    gc.disable()  # nothing of a tree goes before its end
    cpu_s = int(TIMEOUT_S)
    resource.setrlimit(resource.RLIMIT_AS, (order.memory_bytes, order.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    try:
        adopt_in_place(order.path, order.claim)
    except RefusedError as error:
        return _say(str(error), REFUSED)
    except NoSpaceError as error:
        return _say(str(error), FULL)
    except MemoryError:
        return _say(f"{order.path}: it takes over {order.memory_bytes} bytes of memory", REFUSED)
    except Exception as error:  # a fault of ours: the node goes on without this index
        return _say(repr(error), FAILED)
    return 0


def _say(fault: str, status: int) -> int:
    sys.stdout.write(fault[:SAID_BYTES])
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
