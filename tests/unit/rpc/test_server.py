"""What must hold on the wire: codes, messages, blocks, namespaces, and the life of the socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.field_mask_pb2 import FieldMask

from snapshotter import errors
from snapshotter.rpc.pb.containerd.services.snapshots.v1 import snapshots_pb2 as pb
from snapshotter.rpc.pb.containerd.services.snapshots.v1 import snapshots_pb2_grpc as pb_grpc
from snapshotter.rpc.server import RpcServer
from snapshotter.rpc.snapshots import SnapshotsService, register
from snapshotter.rpc.status import status_of
from snapshotter.snapshots.database import Database
from snapshotter.snapshots.metastore import SCHEMA
from snapshotter.snapshots.snapshotter import Snapshotter, SnapshotterConfig
from tests.fakes.lazy import FakeLazyLayers

REF = "containerd.io/snapshot.ref"
Stub = Any


@pytest.fixture
def lazy() -> FakeLazyLayers:
    return FakeLazyLayers()


@pytest.fixture
async def stub(tmp_path: Path, lazy: FakeLazyLayers) -> AsyncIterator[Stub]:
    database = await Database.open(tmp_path / "ember.db", [SCHEMA])
    config = SnapshotterConfig(overlay_options=())
    snapshotter = Snapshotter(database, tmp_path, lazy, config)
    await snapshotter.start()
    server = RpcServer(tmp_path / "s", [partial(register, SnapshotsService(snapshotter))])
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path / 's'}") as channel:
        yield pb_grpc.SnapshotsStub(channel)
    await server.stop()
    await snapshotter.close()
    await database.close()


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def listed(stub: Stub, *filters: str) -> list[list[str]]:
    request = pb.ListSnapshotsRequest(filters=filters)
    return [[info.name for info in block.info] async for block in stub.List(request)]


async def test_a_layer_goes_through_its_whole_life(stub: Stub) -> None:
    prepared = await stub.Prepare(pb.PrepareSnapshotRequest(key="key", labels={"l": "1"}))
    assert [mount.type for mount in prepared.mounts] == ["bind"]
    assert (await stub.Mounts(pb.MountsRequest(key="key"))).mounts == prepared.mounts
    info = (await stub.Stat(pb.StatSnapshotRequest(key="key"))).info
    assert (info.kind, info.created_at) == (pb.ACTIVE, info.updated_at)
    await stub.Commit(pb.CommitSnapshotRequest(name="name", key="key", labels={"m": "2"}))
    view = await stub.View(pb.ViewSnapshotRequest(key="view", parent="name"))
    assert list(view.mounts[0].options) == ["ro", "rbind"]
    changed = pb.UpdateSnapshotRequest(
        info=pb.Info(name="name", labels={"n": "3"}), update_mask=FieldMask(paths=["labels.n"])
    )
    assert dict((await stub.Update(changed)).info.labels) == {"m": "2", "n": "3"}
    usage = await stub.Usage(pb.UsageRequest(key="name"))
    assert usage.inodes == 1
    assert await listed(stub) == [["name", "view"]]
    await stub.Remove(pb.RemoveSnapshotRequest(key="view"))
    await stub.Remove(pb.RemoveSnapshotRequest(key="name"))
    await stub.Cleanup(pb.CleanupRequest())
    assert await listed(stub) == []


async def test_errors_have_the_codes_that_containerd_acts_on(stub: Stub) -> None:
    await stub.Prepare(pb.PrepareSnapshotRequest(key="key"))
    code, _ = await refused(stub.Stat(pb.StatSnapshotRequest(key="missing")))
    assert code is grpc.StatusCode.NOT_FOUND
    code, _ = await refused(stub.Prepare(pb.PrepareSnapshotRequest(key="key")))
    assert code is grpc.StatusCode.ALREADY_EXISTS
    code, _ = await refused(stub.View(pb.ViewSnapshotRequest(key="v", parent="key")))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    await stub.Commit(pb.CommitSnapshotRequest(name="name", key="key"))
    code, _ = await refused(stub.Mounts(pb.MountsRequest(key="name")))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    await stub.View(pb.ViewSnapshotRequest(key="v", parent="name"))
    code, message = await refused(stub.Remove(pb.RemoveSnapshotRequest(key="name")))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "remove" in message
    with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
        await listed(stub, "name=")


async def test_a_taken_layer_says_already_exists_and_is_found_by_label_and_parent(
    stub: Stub, lazy: FakeLazyLayers
) -> None:
    lazy.taken = {"sha256:chain"}
    request = pb.PrepareSnapshotRequest(key="extract", labels={REF: "sha256:chain"})
    code, _ = await refused(stub.Prepare(request, metadata=[("containerd-namespace", "k8s.io")]))
    assert code is grpc.StatusCode.ALREADY_EXISTS
    assert lazy.claims[0].namespace == "k8s.io"
    assert await listed(stub, f'labels."{REF}"==sha256:chain,parent==""') == [["sha256:chain"]]


async def test_a_call_without_a_namespace_is_of_the_default_one(
    stub: Stub, lazy: FakeLazyLayers
) -> None:
    await stub.Prepare(pb.PrepareSnapshotRequest(key="extract", labels={REF: "sha256:chain"}))
    assert lazy.claims[0].namespace == "default"


async def test_list_sends_blocks_of_a_hundred(stub: Stub) -> None:
    await asyncio.gather(
        *(stub.View(pb.ViewSnapshotRequest(key=f"v{number}")) for number in range(250))
    )
    assert [len(block) for block in await listed(stub)] == [100, 100, 50]


async def test_a_layer_that_is_not_ready_is_unavailable_and_says_how_far_it_is(
    stub: Stub, lazy: FakeLazyLayers
) -> None:
    lazy.taken, lazy.ready = {"sha256:chain"}, False
    await refused(
        stub.Prepare(pb.PrepareSnapshotRequest(key="extract", labels={REF: "sha256:chain"}))
    )
    await stub.Prepare(pb.PrepareSnapshotRequest(key="key", parent="sha256:chain"))
    code, message = await refused(stub.Mounts(pb.MountsRequest(key="key")))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "3 of 10 MiB" in message


async def test_an_error_about_something_long_still_arrives(stub: Stub) -> None:
    code, message = await refused(stub.Stat(pb.StatSnapshotRequest(key="k" * 30_000)))
    assert code is grpc.StatusCode.NOT_FOUND
    assert 1000 < len(message) < 5000


async def test_names_may_hold_any_character(stub: Stub) -> None:
    for key in ("nul\0key", "nul\0other", "ü\n\t", "'; DROP TABLE snapshots; --"):
        await stub.Prepare(pb.PrepareSnapshotRequest(key=key, labels={key: key}))
        info = (await stub.Stat(pb.StatSnapshotRequest(key=key))).info
        assert (info.name, dict(info.labels)) == (key, {key: key})
    assert len((await listed(stub))[0]) == 4


async def test_big_messages_pass_up_to_containerds_limit(stub: Stub) -> None:
    labels = {f"l{number}": "v" * 4000 for number in range(2000)}
    await stub.Prepare(pb.PrepareSnapshotRequest(key="key", labels=labels))
    code, _ = await refused(
        stub.Prepare(pb.PrepareSnapshotRequest(key="other", labels={"l": "v" * (17 << 20)}))
    )
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_second_daemon_does_not_take_the_socket(stub: Stub, tmp_path: Path) -> None:
    second = RpcServer(tmp_path / "s", [])
    with pytest.raises(errors.FailedPreconditionError, match="another daemon"):
        await second.start()
    assert await listed(stub) == []


async def test_a_stale_socket_is_replaced_and_a_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "s"
    path.parent.mkdir()
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    server = RpcServer(path, [])
    await server.start()
    assert path.stat().st_mode & 0o777 == 0o600
    await server.stop()
    assert list(path.parent.iterdir()) == []
    path.write_text("not a socket")
    with pytest.raises(errors.ConfigError, match="in the way"):
        await RpcServer(path, []).start()
    with pytest.raises(errors.ConfigError, match="longer"):
        await RpcServer(tmp_path / ("x" * 120), []).start()


def test_every_error_class_has_a_code_of_its_kind() -> None:
    made = [
        kind("what happened")
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.EmberError)
        if kind is not errors.EmberError
    ]
    codes = {type(error).__name__: status_of(error, "Prepare")[0] for error in made}
    assert grpc.StatusCode.INTERNAL not in codes.values()
    assert codes["BusyError"] is codes["UnavailableError"] is grpc.StatusCode.UNAVAILABLE
    said = status_of(errors.EmberError("said on purpose"), "Mounts")
    assert said == (grpc.StatusCode.INTERNAL, "said on purpose")
    assert codes["DeadlineError"] is grpc.StatusCode.DEADLINE_EXCEEDED


def test_what_is_not_expected_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    code, message = status_of(ValueError("secret token"), "Stat")
    assert code is grpc.StatusCode.INTERNAL
    assert "secret" not in message
    assert "secret token" in caplog.text
    code, message = status_of(OSError(28, "No space left on device", "/var/lib/x"), "Prepare")
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "/var/lib/x" in message
