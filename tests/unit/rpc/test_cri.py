"""A pull through CRI: when it is chosen, what CRI is told, and what the user is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from snapshotter.content import Digest, chain_ids
from snapshotter.errors import EmberError, NotFoundError, UnavailableError
from snapshotter.oci.credentials import Credential, Login
from snapshotter.oci.platform import Platform
from snapshotter.oci.reference import parse_reference
from snapshotter.oci.resolver import LayerDescriptor, ResolvedImage
from snapshotter.rpc import cri
from snapshotter.rpc.containerd import Containerd
from snapshotter.rpc.pb.containerd.services.introspection.v1 import introspection_pb2
from snapshotter.rpc.pb.containerd.services.snapshots.v1 import snapshots_pb2
from snapshotter.rpc.pb.cri import images_pb2
from snapshotter.rpc.pull import PullStep
from tests.fakes.upstream import Upstream, fail, reply

INFO = "/runtime.v1.ImageService/ImageFsInfo"
PULL = "/runtime.v1.ImageService/PullImage"
PLUGINS = "/containerd.services.introspection.v1.Introspection/Plugins"
STAT = "/containerd.services.snapshots.v1.Snapshots/Stat"
SECRET = Credential("user", "pass:word", "identity", "registry")


def digest(letter: str) -> Digest:
    return Digest("sha256", letter * 64)


def image(*diff_ids: Digest) -> ResolvedImage:
    layers = tuple(LayerDescriptor(d, 1, "x", {}, d) for d in diff_ids)
    return ResolvedImage(
        parse_reference("registry.example:5000/team/app:1"),
        digest("e"),
        "index",
        digest("f"),
        "manifest",
        b"",
        None,
        digest("d"),
        b"",
        layers,
        Platform("linux", "amd64"),
    )


LAYERS = (digest("1"), digest("2"), digest("3"))
CHAIN = [str(chain) for chain in chain_ids(LAYERS)]
IMAGE = image(*LAYERS)


@dataclass
class Stage:
    """containerd as the daemon sees it, and what a pull reported."""

    containerd: Containerd
    upstream: Upstream
    lazy: bool = True
    here: set[str] = field(default_factory=set)
    steps: list[PullStep] = field(default_factory=list)
    waits_for_last: asyncio.Event = field(default_factory=asyncio.Event)

    def images_at(self, *points: str) -> None:
        usages = [
            images_pb2.FilesystemUsage(fs_id=images_pb2.FilesystemIdentifier(mountpoint=point))
            for point in points
        ]
        answer = images_pb2.ImageFsInfoResponse(image_filesystems=usages)
        self.upstream.answers[INFO] = reply(answer.SerializeToString())

    def loaded(self, exports: dict[str, str] | None) -> None:
        plugins = [] if exports is None else [introspection_pb2.Plugin(id="ember", exports=exports)]
        answer = introspection_pb2.PluginsResponse(plugins=plugins)
        self.upstream.answers[PLUGINS] = reply(answer.SerializeToString())

    async def pull(self, login: Login | None = None) -> None:
        puller = cri.CriPuller(self.containerd, "ember", lambda manifest: self.lazy)
        async with asyncio.timeout(10):
            await puller.pull(IMAGE, login, self._note)

    def _note(self, step: PullStep) -> None:
        self.steps.append(step)
        if (step.position, step.state) == (2, "fetching"):
            self.waits_for_last.set()

    def told(self) -> list[images_pb2.PullImageRequest]:
        pulls = [call for call in self.upstream.calls if call.method == PULL]
        return [images_pb2.PullImageRequest.FromString(call.requests[0]) for call in pulls]

    def states(self) -> list[tuple[int, str]]:
        return [(step.position, step.state) for step in self.steps]

    async def stat(self, requests: Any, context: Any) -> None:
        key = ""
        async for message in requests:
            key = snapshots_pb2.StatSnapshotRequest.FromString(message).key
        if key not in self.here:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such snapshot")
        await context.write(b"")


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with Upstream(tmp_path / "containerd.sock") as upstream:
        containerd = Containerd(upstream.path, 5)
        made = Stage(containerd, upstream)
        made.loaded({"root": "/var/lib/ember"})
        upstream.answers[PULL] = reply(
            images_pb2.PullImageResponse(image_ref="sha256:" + "d" * 64).SerializeToString()
        )
        upstream.answers[STAT] = made.stat
        yield made
        await containerd.close()


@pytest.mark.parametrize(
    "points",
    [
        ("/var/lib/ember",),
        ("/var/lib/containerd/io.containerd.snapshotter.v1.ember",),
        ("/var/lib/ember", "/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs"),
    ],
)
async def test_cri_uses_what_keeps_its_images_first(stage: Stage, points: tuple[str, ...]) -> None:
    stage.images_at(*points)
    assert await cri.uses(stage.containerd, "ember")


@pytest.mark.parametrize(
    "points",
    [
        ("/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs",),
        ("/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs", "/var/lib/ember"),
        ("/var/lib/containerd/io.containerd.snapshotter.v1.ember2",),
        ("",),
        (),
    ],
)
async def test_cri_with_another_snapshotter_is_left_alone(
    stage: Stage, points: tuple[str, ...]
) -> None:
    stage.images_at(*points)
    assert not await cri.uses(stage.containerd, "ember")


async def test_a_root_says_nothing_where_containerd_has_no_such_plugin(stage: Stage) -> None:
    stage.images_at("")
    stage.loaded(None)
    assert not await cri.uses(stage.containerd, "ember")
    stage.images_at("/var/lib/ember")
    assert not await cri.uses(stage.containerd, "ember")


async def test_without_cri_nothing_goes_through_it(stage: Stage) -> None:
    stage.upstream.answers[INFO] = fail(grpc.StatusCode.UNIMPLEMENTED, "unknown service")
    assert not await cri.uses(stage.containerd, "ember")
    assert await cri.home(stage.containerd, "ember") == "default"


async def test_who_names_no_namespace_means_the_kubelets_where_cri_uses_ember(
    stage: Stage,
) -> None:
    stage.images_at("/var/lib/ember")
    assert await cri.home(stage.containerd, "ember") == "k8s.io"
    stage.images_at("/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs")
    assert await cri.home(stage.containerd, "ember") == "default"


async def test_a_cri_that_does_not_answer_is_an_error_and_no_other_way(stage: Stage) -> None:
    stage.upstream.answers[INFO] = fail(grpc.StatusCode.UNAVAILABLE, "not initialized yet")
    with pytest.raises(UnavailableError, match=r"asking CRI.*not initialized yet"):
        await cri.uses(stage.containerd, "ember")


async def test_a_credential_is_for_the_registry_alone_and_complete(stage: Stage) -> None:
    await stage.pull(Login("registry.example:5000", SECRET))
    (request,) = stage.told()
    assert request.image.image == "registry.example:5000/team/app:1"
    assert request.auth.server_address == "https://registry.example:5000"
    assert (request.auth.username, request.auth.password) == ("user", "pass:word")
    assert (request.auth.identity_token, request.auth.registry_token) == ("identity", "registry")


async def test_without_a_credential_cri_is_told_none(stage: Stage) -> None:
    await stage.pull()
    assert not stage.told()[0].HasField("auth")


@pytest.mark.parametrize(("lazy", "state"), [(True, "lazy"), (False, "unpacked")])
async def test_every_layer_is_reported_once_it_is_there(
    stage: Stage, lazy: bool, state: str
) -> None:
    stage.lazy = lazy
    going = asyncio.Event()

    async def pull(requests: Any, context: Any) -> None:
        await going.wait()
        await context.write(b"")

    stage.upstream.answers[PULL] = pull
    stage.here = {CHAIN[0], CHAIN[1]}
    pulling = asyncio.create_task(stage.pull())
    await stage.waits_for_last.wait()
    assert stage.states() == [(0, state), (1, state), (2, "fetching")]
    going.set()
    await pulling
    assert stage.states()[-1] == (2, state)
    assert len([step for step in stage.steps if step.state == state]) == 3


async def test_what_cri_says_of_a_failure_reaches_the_user(stage: Stage) -> None:
    stage.upstream.answers[PULL] = fail(grpc.StatusCode.NOT_FOUND, "manifest: not found")
    with pytest.raises(NotFoundError, match=r"CRI's pull of registry\.example.*manifest: not"):
        await stage.pull(Login("registry.example:5000", SECRET))
    stage.upstream.answers[PULL] = fail(grpc.StatusCode.UNKNOWN, "no unpack platform")
    with pytest.raises(EmberError, match="no unpack platform"):
        await stage.pull()


async def test_a_snapshot_that_cannot_be_asked_for_does_not_end_a_pull(stage: Stage) -> None:
    stage.upstream.answers[STAT] = fail(grpc.StatusCode.INTERNAL, "broken")
    await stage.pull()
    assert [step.position for step in stage.steps if step.state == "lazy"] == [0, 1, 2]


async def test_a_pull_that_is_given_up_is_cancelled_at_cri(stage: Stage) -> None:
    begun = asyncio.Event()

    async def pull(requests: Any, context: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    stage.upstream.answers[PULL] = pull
    pulling = asyncio.create_task(stage.pull())
    await begun.wait()
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    call = next(call for call in stage.upstream.calls if call.method == PULL)
    async with asyncio.timeout(5):
        await call.ended.wait()
    assert call.ended.is_set()
