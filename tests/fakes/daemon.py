"""A daemon that answers commands as a test says: the real control service on a real socket.

It runs in a thread with a loop of its own, because a command blocks whoever runs it. What it was
asked is noted in ``asked``; with ``hangs`` it takes a call and never answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from snapshotter.rpc.control import (
    ControlService,
    DrainState,
    PullEvent,
    Removal,
    WarmLayer,
    WarmState,
    register,
)
from snapshotter.rpc.server import RpcServer
from tests.fakes.loop import loop_in_a_thread

LAYER: dict[str, Any] = {
    "digest": f"sha256:{'a' * 64}",
    "diff_id": f"sha256:{'b' * 64}",
    "size_bytes": 40_000,
    "view_bytes": 100_000,
    "here_bytes": 65_536,
    "index_bytes": 4_096,
    "index_from": {
        "origin": "signed",
        "key": "c" * 64,
        "artifact": f"sha256:{'d' * 64}",
        "repositories": ["registry.example/team/app"],
        "compared": False,
        "fault": "",
    },
    "tiers": {"registry": 30_000},
    "state": "indexed",
    "trouble": "",
}
LAZY: dict[str, Any] = {
    "names": ["registry.example/team/app:1"],
    "manifest": f"sha256:{'1' * 64}",
    "lazy": True,
    "reason": "",
    "suspect": "",
    "suspect_containers": [],
    "leaving": False,
    "lookup": {"outcome": "found", "why": ""},
    "namespaces": ["k8s.io"],
    "here_bytes": 65_536,
    "plain_bytes": 100_000,
    "size_bytes": 40_000,
    "containers": ["k8s.io/c1", "default/c2"],
    "layers": [LAYER],
}
PLAIN: dict[str, Any] = {
    **LAZY,
    "names": ["[fd00::1]:5000/team/[red]odd[/red]:2"],
    "manifest": f"sha256:{'2' * 64}",
    "lazy": False,
    "reason": "layer [bold]sha256:a[/bold] was refused: [/]",
    "here_bytes": 0,
    "plain_bytes": 0,
    "containers": [],
    "layers": [{**LAYER, "view_bytes": 0, "here_bytes": 0, "index_bytes": 0, "tiers": {}}],
}
STATUS: dict[str, Any] = {
    "daemon": {
        "version": "0.1.0",
        "pid": 4321,
        "up_s": 12.5,
        "data_path": {"name": "fanotify", "reasons": []},
        "engine": {"name": "uring", "reason": "uring: io_uring works"},
        "keeper": "pid 4322",
        "keeper_losses": 0,
        "index": {
            "trust": "signed",
            "trusted_keys": "/etc/ember/keys",
            "keys": ["c" * 64],
            "problems": [],
            "lookups": [{"outcome": "found", "count": 1}],
            "wrong": [
                {
                    "layer": f"sha256:{'e' * 64}",
                    "artifact": f"sha256:{'f' * 64}",
                    "repository": "registry.example/team/[odd]",
                    "reason": "its file system is not what the layer's tar holds",
                }
            ],
        },
    },
    "images": [LAZY, PLAIN],
    "indexing": [{"layer": LAYER["digest"], "percent": 40, "size_bytes": 40_000, "quiet_s": 0.0}],
    "misses": {"asked": 3, "filled": 3, "failed": 0, "waited_s": 0.5, "longest_s": 0.25},
    "waiting": [
        {
            "view": LAYER["diff_id"],
            "reads": 2,
            "longest_s": 42.3,
            "offset": 0,
            "length": 4096,
            "why": "registry: [gone]",
        }
    ],
    "guard": None,
    "tiers": {"registry": 30_000},
    "notes": ["1 layer was unpacked as [plain] overlay"],
}


@dataclass
class FakeOperations:
    """Implements rpc.control.Operations."""

    document: dict[str, Any] = field(default_factory=lambda: copy.deepcopy(STATUS))
    steps: tuple[PullEvent, ...] = (
        PullEvent("resolved", total=2, digest="sha256:d"),
        PullEvent("lazy", 0, 2, "sha256:l0"),
        PullEvent("fetching", 1, 2, "sha256:l1"),
        PullEvent("unpacked", 1, 2, "sha256:l1"),
        PullEvent("done", total=2, digest="sha256:d", namespace="k8s.io"),
    )
    warmth: tuple[WarmState, ...] = (
        WarmState("sha256:d", (WarmLayer("sha256:l0", 1000, 0, 0, "waiting"),), False),
        WarmState("sha256:d", (WarmLayer("sha256:l0", 1000, 1000, 900, "here"),), True),
    )
    removal: Removal = field(default_factory=lambda: Removal(1500, ("image sha256:1",), ()))
    states: tuple[DrainState, ...] = (DrainState(1, 5000, ()), DrainState(0, 0, ()))
    fault: Exception | None = None
    hangs: bool = False
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    taken: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)

    async def _begin(self, *words: Any) -> None:
        self.asked.append(words)
        self.taken.set()
        if self.fault is not None:
            raise self.fault
        if self.hangs:
            try:
                await asyncio.Event().wait()
            finally:
                self.left.set()

    async def status(self) -> dict[str, Any]:
        await self._begin("status")
        return self.document

    async def pull(self, image: str, namespace: str, platform: str) -> AsyncIterator[PullEvent]:
        await self._begin("pull", image, namespace, platform)
        for step in self.steps:
            yield step

    async def warm(self, image: str, platform: str) -> AsyncGenerator[WarmState, None]:
        await self._begin("warm", image, platform)
        for state in self.warmth:
            yield state

    async def remove(self, image: str, namespace: str, *, data_only: bool) -> Removal:
        await self._begin("rm", image, namespace, data_only)
        return self.removal

    async def drain(self) -> AsyncIterator[DrainState]:
        await self._begin("drain")
        for state in self.states:
            yield state


@contextlib.contextmanager
def daemon(socket: Path) -> Iterator[FakeOperations]:
    """What answers at ``socket`` while this is entered."""
    operations = FakeOperations()
    server = RpcServer(socket, [partial(register, ControlService(operations))])
    with loop_in_a_thread() as wait_for:
        wait_for(server.start())
        try:
            yield operations
        finally:
            wait_for(server.stop(0))
