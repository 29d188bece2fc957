"""The CRI proxy passes everything on unchanged, and learns credentials on the way."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from snapshotter.oci.credentials import Credential, Wanted
from snapshotter.oci.pull_credentials import PullCredentials
from snapshotter.rpc.cri_proxy import CriProxy
from snapshotter.rpc.cri_pulls import credential_of
from snapshotter.rpc.pb.cri import images_pb2 as pb
from snapshotter.rpc.server import RpcServer
from tests.fakes.upstream import Upstream, fail, reply

PULL = "/runtime.v1.ImageService/PullImage"
OLD_PULL = "/runtime.v1alpha2.ImageService/PullImage"
REMOVE = "/runtime.v1.ImageService/RemoveImage"
LIST = "/runtime.v1.ImageService/ListImages"
IMAGE = "registry.example/team/app:v1"
APP = Wanted("registry.example", "team/app")
ID = "sha256:" + "a" * 64
UNKNOWN_FIELD = b"\xfa\x01\x05extra"


@dataclass
class Stage:
    """Kubelet's channel, the proxy, and containerd behind it."""

    channel: grpc.aio.Channel
    upstream: Upstream
    pulls: PullCredentials
    socket: Path

    async def ask(self, method: str, message: bytes, **options: Any) -> bytes:
        answer: bytes = await self.channel.unary_unary(method, None, None)(message, **options)
        return answer

    async def pull(self, credential: dict[str, str], image: str = IMAGE) -> None:
        await self.ask(PULL, pull_request(image, **credential))

    async def known(self) -> Sequence[Credential]:
        return await self.pulls.find(APP, fresh=False)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    pulls = PullCredentials()
    async with Upstream(tmp_path / "containerd.sock") as upstream:
        upstream.answers[PULL] = reply(pb.PullImageResponse(image_ref=ID).SerializeToString())
        proxy = CriProxy(upstream.path, pulls)
        server = RpcServer(tmp_path / "run" / "cri.sock", [proxy.register], generic=True)
        await server.start()
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/run/cri.sock") as channel:
            yield Stage(channel, upstream, pulls, tmp_path / "run" / "cri.sock")
        await server.stop(0)
        await proxy.close()


def pull_request(image: str, **auth: str) -> bytes:
    request = pb.PullImageRequest(image=pb.ImageSpec(image=image), auth=pb.AuthConfig(**auth))
    raw: bytes = request.SerializeToString()
    return raw + UNKNOWN_FIELD


def remove_request(image: str) -> bytes:
    request = pb.RemoveImageRequest(image=pb.ImageSpec(image=image))
    raw: bytes = request.SerializeToString()
    return raw


async def test_only_root_may_use_the_socket(stage: Stage) -> None:
    assert stage.socket.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("method", [LIST, "/runtime.v1.RuntimeService/Version", "/any.Thing/Else"])
async def test_a_call_goes_through_as_the_bytes_that_came(stage: Stage, method: str) -> None:
    assert await stage.ask(method, b"\xff\x00raw") == b"\xff\x00raw"
    assert stage.upstream.calls[0].method == method
    assert stage.upstream.calls[0].requests == [b"\xff\x00raw"]


async def test_metadata_and_deadlines_go_through(stage: Stage) -> None:
    async def answer(requests: Any, context: Any) -> None:
        await context.send_initial_metadata((("first", "1"),))
        await context.write(b"x")
        context.set_trailing_metadata((("last-bin", b"\x00\x01"),))

    stage.upstream.answers[LIST] = answer
    call = stage.channel.unary_unary(LIST, None, None)(
        b"", metadata=(("who", "kubelet"), ("raw-bin", b"\xff")), timeout=50
    )
    assert await call == b"x"
    assert ("first", "1") in tuple(await call.initial_metadata())
    assert ("last-bin", b"\x00\x01") in tuple(await call.trailing_metadata())
    (seen,) = stage.upstream.calls
    assert (seen.metadata["who"], seen.metadata["raw-bin"]) == ("kubelet", b"\xff")
    assert seen.time_left_s is not None
    assert 40 < seen.time_left_s < 51


async def test_a_failure_goes_through_with_its_details(stage: Stage) -> None:
    details = ("grpc-status-details-bin", b"\x08\x05")
    stage.upstream.answers[LIST] = fail(grpc.StatusCode.NOT_FOUND, "no such image ü", details)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stage.ask(LIST, b"")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == "no such image ü"
    trailing: Iterable[object] = caught.value.trailing_metadata()
    assert details in tuple(trailing)


async def test_an_answer_that_comes_before_the_request_was_read_is_the_true_one(
    stage: Stage,
) -> None:
    """The kubelet falls back on UNIMPLEMENTED, and on nothing else."""

    async def unknown(requests: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "unknown method Nope")

    method = "/runtime.v1.RuntimeService/Nope"
    stage.upstream.answers[method] = unknown
    for size in (0, 10, 300_000) * 20:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stage.ask(method, bytes(size), timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert caught.value.details() == "unknown method Nope"


async def test_streams_go_through_both_ways_as_they_come(stage: Stage) -> None:
    call = stage.channel.stream_stream("/any.Thing/Chat", None, None)(None)
    for number in range(5):
        await call.write(b"%d" % number)
        assert await call.read() == b"%d" % number
    await call.done_writing()
    assert not isinstance(await call.read(), bytes), "an end is no message"
    assert await call.code() is grpc.StatusCode.OK


async def test_a_long_answer_comes_in_all_its_messages(stage: Stage) -> None:
    messages = [bytes([number]) * 100_000 for number in range(50)]
    stage.upstream.answers["/runtime.v1.ImageService/StreamImages"] = reply(*messages)
    call = stage.channel.unary_stream("/runtime.v1.ImageService/StreamImages", None, None)(b"")
    assert [message async for message in call] == messages


async def test_a_big_message_goes_through(stage: Stage) -> None:
    data = b"x" * (3 * 1024 * 1024)
    assert len(await stage.ask(LIST, data)) == len(data)


async def test_a_cancelled_call_is_cancelled_at_containerd_too(stage: Stage) -> None:
    async def never(requests: Any, context: Any) -> None:
        await asyncio.Event().wait()

    stage.upstream.answers[PULL] = never
    request = pull_request(IMAGE, username="u", password="p")
    call = stage.channel.unary_unary(PULL, None, None)(request)
    await asyncio.wait_for(stage.upstream.arrived.wait(), 10)
    call.cancel()
    await asyncio.wait_for(stage.upstream.calls[0].ended.wait(), 10)
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_the_credential_is_there_while_the_pull_runs(stage: Stage) -> None:
    found: list[Credential] = []

    async def answer(requests: Any, context: Any) -> None:
        async for _ in requests:
            found.extend(await stage.known())
        await context.write(pb.PullImageResponse(image_ref=ID).SerializeToString())

    stage.upstream.answers[PULL] = answer
    await stage.pull({"username": "u", "password": "p:w"})
    assert found == [Credential("u", "p:w")]
    assert await stage.known() == found
    sent = stage.upstream.calls[0].requests[0]
    assert sent == pull_request(IMAGE, username="u", password="p:w")


async def test_the_older_name_of_the_service_counts_too(stage: Stage) -> None:
    stage.upstream.answers[OLD_PULL] = reply(b"")
    await stage.ask(OLD_PULL, pull_request(IMAGE, username="u", password="p"))
    assert len(await stage.known()) == 1


@pytest.mark.parametrize(
    ("auth", "credential"),
    [
        ({"username": "u", "password": "p"}, Credential("u", "p")),
        ({"auth": base64.b64encode(b"u:p:w").decode()}, Credential("u", "p:w")),
        ({"auth": "!"}, Credential()),
        ({"identity_token": "i"}, Credential(identity_token="i")),
        ({"registry_token": "r"}, Credential(registry_token="r")),
        ({}, Credential()),
    ],
)
def test_each_form_of_the_cri_s_auth_is_understood(
    auth: dict[str, str], credential: Credential
) -> None:
    assert credential_of(pb.AuthConfig(**auth)) == credential


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\xff\xff\xff",
        pull_request(IMAGE),
        pull_request("NOT A NAME", username="u", password="p"),
        pull_request(IMAGE, username="u", password="p", server_address="other.example"),
    ],
)
async def test_what_teaches_nothing_goes_through_all_the_same(
    stage: Stage, request_bytes: bytes
) -> None:
    await stage.ask(PULL, request_bytes)
    assert stage.upstream.calls[0].requests == [request_bytes]
    assert len(stage.pulls) == 0


async def test_a_pull_that_fails_teaches_nothing_and_unteaches_nothing(stage: Stage) -> None:
    await stage.pull({"username": "good", "password": "p"})
    stage.upstream.answers[PULL] = fail(grpc.StatusCode.UNKNOWN, "401")
    for name in ("bad", "good"):
        with pytest.raises(grpc.aio.AioRpcError):
            await stage.pull({"username": name, "password": "p"})
    assert [credential.username for credential in await stage.known()] == ["good"]


async def test_two_pods_may_have_a_credential_each(stage: Stage) -> None:
    for name in ("one", "two", "one"):
        await stage.pull({"username": name, "password": "p"})
    assert [credential.username for credential in await stage.known()] == ["one", "two"]


@pytest.mark.parametrize("named", [IMAGE, ID])
async def test_removing_the_image_forgets_its_credentials(stage: Stage, named: str) -> None:
    await stage.pull({"username": "u", "password": "p"})
    await stage.pull({"username": "u", "password": "p"}, "registry.example/team/app:v2")
    stage.upstream.answers[PULL] = reply(pb.PullImageResponse(image_ref="x").SerializeToString())
    await stage.pull({"username": "u", "password": "p"}, "other.example/kept")
    stage.upstream.answers[REMOVE] = fail(grpc.StatusCode.UNKNOWN, "in use")
    with pytest.raises(grpc.aio.AioRpcError):
        await stage.ask(REMOVE, remove_request(named))
    assert len(stage.pulls) == 3
    stage.upstream.answers[REMOVE] = reply(b"")
    await stage.ask(REMOVE, remove_request(named))
    assert await stage.known() == []
    assert len(stage.pulls) == 1


async def test_removing_another_image_forgets_nothing(stage: Stage) -> None:
    await stage.pull({"username": "u", "password": "p"})
    stage.upstream.answers[REMOVE] = reply(b"")
    for message in (remove_request("registry.example/team/other"), b"\xff\xff"):
        await stage.ask(REMOVE, message)
    assert len(await stage.known()) == 1


async def test_without_containerd_the_error_names_its_socket(tmp_path: Path) -> None:
    proxy = CriProxy(tmp_path / "missing.sock", PullCredentials())
    server = RpcServer(tmp_path / "cri.sock", [proxy.register], generic=True)
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/cri.sock") as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=r"missing\.sock") as caught:
            await channel.unary_unary(LIST, None, None)(b"")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(0)
    await proxy.close()


async def test_containerd_may_restart_behind_the_proxy(stage: Stage, tmp_path: Path) -> None:
    assert await stage.ask(LIST, b"1") == b"1"
    await stage.upstream.__aexit__()
    with pytest.raises(grpc.aio.AioRpcError):
        await stage.ask(LIST, b"2")
    async with Upstream(tmp_path / "containerd.sock"), asyncio.timeout(20):
        answer = None
        while answer is None:
            try:
                answer = await stage.ask(LIST, b"3")
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert answer == b"3"
