"""A node as the tests see it: bed, Ember and a real containerd, asked without any command line.

What a client of containerd does to see an image is done here call by call: pull, View, mount(2) of
the mounts that come back, walk, remove. Calls go through containerd, never past it to Ember's
snapshots. Everything is bounded in time; ``node`` cleans up after itself, keeper included.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc

from bench.bed.bed import Bed
from bench.bed.containerd import Containerd
from bench.bed.ember import Ember
from bench.bed.link import Shape
from bench.bed.process import BedError
from ioengine.mounts import unmount
from snapshotter.rpc.pb.containerd.services.snapshots.v1 import snapshots_pb2, snapshots_pb2_grpc
from snapshotter.rpc.pb.containerd.types import mount_pb2
from snapshotter.rpc.pb.ember.control.v1 import control_pb2, control_pb2_grpc
from tests.patience import until
from tests.treecheck import Rows, walk

CALL_S = 60.0
_FLAGS = {"ro": 1, "rbind": 4096 | 16384, "bind": 4096}
_REMOUNT = 32
_LONG = 4096 - 512
"""Options of this size and more are shortened: mount(2) takes a page of them."""
_CHANGING = threading.Lock()
"""The working directory is the whole process's."""
Call = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull through Ember came to."""

    layers: int
    lazy_layers: int
    reason: str


def words_of(error: grpc.RpcError) -> str:
    """What a failed call says to a user; "" where it says nothing."""
    return error.details() or ""


class Node:
    """Ember and one containerd on a bed. Failures are grpc.RpcError with what a user reads."""

    def __init__(self, bed: Bed, ember: Ember, containerd: Containerd) -> None:
        self.bed = bed
        self.ember = ember
        self.containerd = containerd
        self.namespace = containerd.namespace
        self._serial = itertools.count()
        self._open = contextlib.ExitStack()
        self._scratch = Path(tempfile.mkdtemp(prefix="seen-", dir=bed.directory))
        self.connect()

    def connect(self) -> None:
        """Connect anew: to be called after either side was started again."""
        self._open.close()
        options = [("grpc.max_reconnect_backoff_ms", 200)]
        daemon = self._open.enter_context(grpc.insecure_channel(f"unix:{self.ember.socket}"))
        channel = self._open.enter_context(
            grpc.insecure_channel(f"unix:{self.containerd.address}", options=options)
        )
        self._control = control_pb2_grpc.ControlStub(daemon)
        self._snapshots = snapshots_pb2_grpc.SnapshotsStub(channel)

    def start_again(self) -> None:
        """Start the daemon, and wait until containerd has redialled it."""
        self.ember.start()
        self.connect()
        self.wait_for_containerd()

    def wait_for_containerd(self) -> None:
        """Until containerd has dialled the daemon; one that was there first waits in between."""
        assert self.until(self._reached, 20)

    def _reached(self) -> bool:
        try:
            self.containerd.ctr("snapshots", "--snapshotter", "ember", "ls")
        except BedError:
            return False
        return True

    def close(self) -> None:
        """Hang up; the bed is the caller's."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def pull(self, reference: str, namespace: str = "") -> Pulled:
        """What `ember pull` does."""
        request = control_pb2.PullRequest(image=reference, namespace=namespace or self.namespace)
        lazy, last = 0, control_pb2.PullProgress()
        for last in self._control.Pull(request, timeout=CALL_S):
            lazy += last.state == "lazy"
        assert last.state == "done"
        return Pulled(last.total, lazy, last.reason)

    def warming(self, reference: str) -> Generator[control_pb2.WarmProgress, None, None]:
        """What `ember warm` is told; closed early, it hangs up."""
        call = self._control.Warm(control_pb2.WarmRequest(image=reference), timeout=CALL_S)
        try:
            yield from call
        finally:
            call.cancel()

    def warm(self, reference: str) -> control_pb2.WarmProgress:
        """What `ember warm` does; the last it is told."""
        *_, last = self.warming(reference)
        assert last.done
        return last

    def drain(self) -> Iterator[control_pb2.DrainProgress]:
        """What `ember drain` is told."""
        yield from self._control.Drain(control_pb2.DrainRequest(), timeout=CALL_S)

    def drop(self, reference: str) -> control_pb2.RemoveResponse:
        """What `ember rm --data` does."""
        return self._remove(reference, data_only=True)

    def remove(self, reference: str) -> control_pb2.RemoveResponse:
        """What `ember rm` does."""
        return self._remove(reference, data_only=False)

    def _remove(self, reference: str, *, data_only: bool) -> control_pb2.RemoveResponse:
        request = control_pb2.RemoveRequest(
            image=reference, data_only=data_only, namespace=self.namespace
        )
        return self._control.Remove(request, timeout=CALL_S)

    def status(self) -> dict[str, Any]:
        """The status document."""
        answer = self._control.Status(control_pb2.StatusRequest(), timeout=CALL_S)
        document: dict[str, Any] = json.loads(answer.json)
        return document

    def image(self, reference: str) -> dict[str, Any]:
        """What the status document says of one image."""
        images: list[dict[str, Any]] = self.status()["images"]
        return next(image for image in images if reference in image["names"])

    def until(self, holds: Callable[[], bool], limit_s: float = 30.0) -> bool:
        """Wait for something that happens in the background; whether it did."""
        return until(holds, limit_s)

    def blobs(self) -> set[str]:
        """The digests that containerd's content store holds for this namespace."""
        return set(self.containerd.ctr("content", "ls", "-q").split())

    @contextlib.contextmanager
    def snapshot(
        self,
        chain_id: str,
        *,
        snapshotter: str = "ember",
        namespace: str = "",
        writable: bool = False,
    ) -> Iterator[Callable[[], list[mount_pb2.Mount]]]:
        """A snapshot on ``chain_id`` for a while; what is yielded asks for its mounts."""
        meta, key = self._meta(namespace), f"seen-{next(self._serial)}"
        common = {"snapshotter": snapshotter, "key": key}
        if writable:
            make: Call = self._snapshots.Prepare
            request: Any = snapshots_pb2.PrepareSnapshotRequest(**common, parent=chain_id)
        else:
            make = self._snapshots.View
            request = snapshots_pb2.ViewSnapshotRequest(**common, parent=chain_id)
        # Without a lease containerd's collector would be free to take the new snapshot.
        request.labels["containerd.io/gc.root"] = "test"
        make(request, timeout=CALL_S, metadata=meta)

        def ask() -> list[mount_pb2.Mount]:
            asked = snapshots_pb2.MountsRequest(**common)
            return list(self._snapshots.Mounts(asked, timeout=2 * CALL_S, metadata=meta).mounts)

        try:
            yield ask
        finally:
            gone = snapshots_pb2.RemoveSnapshotRequest(**common)
            self._snapshots.Remove(gone, timeout=CALL_S, metadata=meta)

    @contextlib.contextmanager
    def mounted(self, chain_id: str, **options: Any) -> Iterator[Path]:
        """What a container on ``chain_id`` would see: a snapshot of it, mounted."""
        with self.snapshot(chain_id, **options) as ask:
            target = Path(tempfile.mkdtemp(dir=self._scratch))
            mount(ask(), target)
            try:
                yield target
            finally:
                unmount(target, detach=False)
                target.rmdir()

    def prepare(
        self, request: snapshots_pb2.PrepareSnapshotRequest, *, timeout_s: float = CALL_S
    ) -> list[mount_pb2.Mount]:
        """Ask containerd for a snapshot, as its unpacker does."""
        answer = self._snapshots.Prepare(request, timeout=timeout_s, metadata=self._meta(""))
        return list(answer.mounts)

    def commit(self, name: str, key: str) -> None:
        """Commit a snapshot; it is kept until it is removed."""
        request = snapshots_pb2.CommitSnapshotRequest(snapshotter="ember", name=name, key=key)
        request.labels["containerd.io/gc.root"] = "test"
        self._snapshots.Commit(request, timeout=CALL_S, metadata=self._meta(""))

    def remove_snapshot(self, key: str) -> None:
        """Remove a snapshot of this namespace."""
        gone = snapshots_pb2.RemoveSnapshotRequest(snapshotter="ember", key=key)
        self._snapshots.Remove(gone, timeout=CALL_S, metadata=self._meta(""))

    def shown(self, chain_id: str, **options: Any) -> Rows:
        """Every path of the snapshot, read wholly."""
        with self.mounted(chain_id, **options) as root:
            return walk(root)

    def _meta(self, namespace: str) -> tuple[tuple[str, str], ...]:
        return (("containerd-namespace", namespace or self.namespace),)


def mount(mounts: Sequence[mount_pb2.Mount], target: Path) -> None:
    """mount(2) as containerd's own library does it: long options by names from a common parent."""
    assert len(mounts) == 1, mounts
    flags, options = 0, {}
    for option in mounts[0].options:
        if option in _FLAGS:
            flags |= _FLAGS[option]
        elif option != "rw":
            name, _, value = option.partition("=")
            options[name] = value
    common = Path("/")
    size = sum(len(option) + 1 for option in mounts[0].options)
    if size >= _LONG and len(lower := options.get("lowerdir", "").split(":")) > 1:
        common = Path(os.path.commonpath(lower))
        options["lowerdir"] = ":".join(os.path.relpath(path, common) for path in lower)
    data = ",".join(f"{name}={value}" if value else name for name, value in options.items())
    with _CHANGING, contextlib.chdir(common):
        call(mounts[0].source, target, mounts[0].type, flags, data)
    if flags & _FLAGS["bind"] and flags & _FLAGS["ro"]:
        call(mounts[0].source, target, mounts[0].type, flags | _REMOUNT, "")


def call(source: str, target: Path, kind: str, flags: int, data: str) -> None:
    """mount(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    words = (os.fsencode(source), os.fsencode(target), kind.encode())
    if libc.mount(*words, flags, os.fsencode(data) or None):
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: {kind} {source} on {target}: {data}")


@contextlib.contextmanager
def node(
    cache: Path, *, major: int = 1, shape: Shape | None = None, **configuration: Any
) -> Iterator[Node]:
    """A bed with an Ember and a containerd that run; ``configuration``: Ember.configure's.

    What is not configured is as it is for users, completion too.
    """
    with Bed(shape or Shape(0), cache=cache) as bed:
        ember = bed.ember(major)
        ember.configure(**configuration)
        containerd = bed.containerd(major, ember_socket=ember.socket, ember_root=ember.root)
        ember.start()
        with Node(bed, ember, containerd) as made:
            made.wait_for_containerd()
            yield made
