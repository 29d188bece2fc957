"""The shaped link: the loopback of a network namespace, limited by a token bucket.

Registry, containerd and clients live in the namespace and meet at localhost, which clients treat as
plain HTTP without being told. Only the network is entered: `ip netns exec` would also mount its own
/sys and hide the control groups from runc.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from bench.bed.process import BedError, run

NAMESPACES = Path("/run/netns")
BURST_KB = 256
QUEUE_MS = 100
# A packet must fit the burst: loopback's own 65,536 bytes and offloads on top would not.
MTU_BYTES = 16384


@dataclass(frozen=True)
class Shape:
    """What the link looks like: ``rate_mbit`` 0 = not limited, ``delay_ms`` each way."""

    rate_mbit: float = 200.0
    delay_ms: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.rate_mbit * 1e6 / 8

    def __str__(self) -> str:
        rate = f"{self.rate_mbit:g} Mbit/s" if self.rate_mbit else "no limit"
        return f"{rate}, {2 * self.delay_ms:g} ms round trip" if self.delay_ms else rate


class Link:
    """A network namespace with a shaped loopback and nothing else in it."""

    def __init__(self, name: str, shape: Shape) -> None:
        self.name = name
        self.shape = shape

    def create(self) -> None:
        run(["ip", "netns", "add", self.name])
        run(["ip", "-n", self.name, "link", "set", "lo", "up", "mtu", str(MTU_BYTES)])
        self.reshape(self.shape)

    def reshape(self, shape: Shape) -> None:
        """Change the rate of a link that is in use (the delay is the relay's)."""
        self.shape = shape
        if self._qdisc() == "tbf":
            run(["tc", "-n", self.name, "qdisc", "del", "dev", "lo", "root"])
        if shape.rate_mbit:
            words = ["tc", "-n", self.name, "qdisc", "add", "dev", "lo", "root", "tbf"]
            words += ["rate", f"{shape.rate_mbit:g}mbit", "burst", f"{BURST_KB}kb"]
            run([*words, "latency", f"{QUEUE_MS}ms"])

    def _qdisc(self) -> str:
        rows = json.loads(run(["tc", "-n", self.name, "-j", "qdisc", "show", "dev", "lo"]))
        return str(rows[0].get("kind", "")) if rows else ""

    def sent_bytes(self) -> int:
        """Bytes over the link since it was shaped: both directions, with their headers."""
        rows = json.loads(run(["tc", "-n", self.name, "-s", "-j", "qdisc", "show", "dev", "lo"]))
        if not rows or "bytes" not in rows[0]:
            raise BedError(f"{self.name}: the link is not shaped, so nothing counts its bytes")
        return int(rows[0]["bytes"])

    def enter(self) -> list[str]:
        """Words to put before a command that shall run on this link."""
        return ["nsenter", f"--net={NAMESPACES / self.name}"]

    def remove(self) -> None:
        if (NAMESPACES / self.name).exists():
            run(["ip", "netns", "del", self.name])
