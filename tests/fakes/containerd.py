"""A containerd that says of itself what a test tells it to: version, plugins, CRI."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc

from snapshotter.rpc.pb.containerd.services.introspection.v1 import introspection_pb2
from snapshotter.rpc.pb.cri import images_pb2
from tests.fakes.loop import loop_in_a_thread
from tests.fakes.upstream import Upstream, fail, reply

VERSION = "/containerd.services.version.v1.Version/Version"
PLUGINS = "/containerd.services.introspection.v1.Introspection/Plugins"
IMAGE_PLACE = "/runtime.v1.ImageService/ImageFsInfo"
CRI_STATUS = "/runtime.v1.RuntimeService/Status"


class FakeContainerd:
    """Without a word it is a 2.4 with our plugin, and serves no CRI."""

    def __init__(self, upstream: Upstream, exports: Mapping[str, str]) -> None:
        self._answers = upstream.answers
        self.is_version("v2.4.2")
        self.has_plugin(exports)
        for method in (IMAGE_PLACE, CRI_STATUS):
            self._answers[method] = fail(grpc.StatusCode.UNIMPLEMENTED, "unknown service")

    def is_version(self, version: str) -> None:
        self._answers[VERSION] = reply(b"\n" + bytes([len(version)]) + version.encode())

    def has_plugin(self, exports: Mapping[str, str] | None, *capabilities: str) -> None:
        plugin = introspection_pb2.Plugin(id="ember", exports=exports, capabilities=capabilities)
        plugins = [] if exports is None else [plugin]
        answer = introspection_pb2.PluginsResponse(plugins=plugins)
        self._answers[PLUGINS] = reply(answer.SerializeToString())

    def serves_cri(self, place: str, *, disabled: bool | None = None) -> None:
        """CRI with its images at ``place``; ``disabled``: what its configuration says of labels."""
        where = images_pb2.FilesystemUsage(fs_id=images_pb2.FilesystemIdentifier(mountpoint=place))
        answer = images_pb2.ImageFsInfoResponse(image_filesystems=[where])
        self._answers[IMAGE_PLACE] = reply(answer.SerializeToString())
        inner = {} if disabled is None else {"disableSnapshotAnnotations": disabled}
        status = images_pb2.StatusResponse(info={"config": json.dumps({"containerd": inner})})
        self._answers[CRI_STATUS] = reply(status.SerializeToString())


@contextlib.contextmanager
def fake_containerd(path: Path, exports: Mapping[str, str]) -> Iterator[FakeContainerd]:
    """What answers at ``path`` while this is entered."""
    upstream = Upstream(path)
    with loop_in_a_thread() as wait_for:
        wait_for(upstream.__aenter__())
        try:
            yield FakeContainerd(upstream, exports)
        finally:
            wait_for(upstream.__aexit__())
