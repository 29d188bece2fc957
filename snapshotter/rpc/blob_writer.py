"""One blob on its way into containerd's content store.

containerd lets one client write a blob at a time, verifies its digest at the commit, and keeps what
a broken write has left. Each message must be answered within its time.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from snapshotter.content import Digest
from snapshotter.errors import InvalidArgumentError, UnavailableError
from snapshotter.rpc.pb.containerd.services.content.v1 import content_pb2, content_pb2_grpc
from snapshotter.rpc.remote import error_from_rpc, within

_NAME = re.compile(r"[A-Za-z0-9]+(?:[._-][A-Za-z0-9]+)*", re.ASCII)
_MOST_NAME = 76
_WRITE_BYTES = 1024 * 1024
_CHANGE_S = 30.0
_LOCKED_S = 3600.0
_LOCKED_FIRST_PAUSE_S = 0.02
_LOCKED_MOST_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A blob as a manifest names it."""

    media_type: str
    digest: Digest
    size_bytes: int


def check_namespace(namespace: str) -> None:
    """InvalidArgumentError for a name that containerd has no namespaces by (pkg/identifiers).

    One that fits into no header would make a call that nobody answers.
    """
    if len(namespace) > _MOST_NAME or not _NAME.fullmatch(namespace):
        raise InvalidArgumentError(
            f"no namespace of containerd can be called {namespace[:100]!r}: letters and digits,"
            f" joined by single '.', '_' or '-', at most {_MOST_NAME} of them"
        )


def metadata_for(namespace: str, lease: str | None = None) -> tuple[tuple[str, str], ...]:
    """What each call to containerd carries beside its request; checks the namespace."""
    check_namespace(namespace)
    head = (("containerd-namespace", namespace),)
    return (*head, ("containerd-lease", lease)) if lease else head


class BlobWriter:
    """One write into containerd's content store: stat, write on from there, commit."""

    def __init__(
        self,
        content: content_pb2_grpc.ContentStub,
        namespace: str,
        lease: str,
        descriptor: Descriptor,
        message_s: float,
    ) -> None:
        self._content = content
        self._message_s = message_s
        self._metadata = metadata_for(namespace, lease)
        self._descriptor = descriptor
        self._ref = f"ember-{descriptor.digest}"

    async def write(self, data: AsyncIterator[bytes], labels: Mapping[str, str]) -> None:
        """Send ``data`` from its start; a leftover of an earlier try is thrown away first.

        A blob that is there already gets ``labels`` beside those that it has: without its
        reference to our snapshots, an image pulled for another snapshotter would not keep them.
        """
        digest = self._descriptor.digest
        try:
            try:
                await self._send(data, labels)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.ALREADY_EXISTS:
                    raise
                await self._label(labels)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"writing {digest} to containerd") from None

    async def _label(self, labels: Mapping[str, str]) -> None:
        if not labels:
            return
        request = content_pb2.UpdateRequest(
            info=content_pb2.Info(digest=str(self._descriptor.digest), labels=dict(labels)),
            update_mask={"paths": [f"labels.{key}" for key in labels]},
        )
        await self._content.Update(request, metadata=self._metadata, timeout=_CHANGE_S)

    async def _open(self, common: Mapping[str, Any]) -> tuple[Any, int]:
        """A write that is ours, and the offset that it stands at.

        While another client writes the same blob containerd locks us out; as its own clients do,
        we come back until that one is done (then the blob is there) or has given up.
        """
        loop = asyncio.get_running_loop()
        until_s, pause_s = loop.time() + _LOCKED_S, _LOCKED_FIRST_PAUSE_S
        while True:
            call = self._content.Write(metadata=self._metadata)
            try:
                request = content_pb2.WriteContentRequest(action=content_pb2.STAT, **common)
                return call, (await self._ask(call, request)).offset
            except grpc.aio.AioRpcError as error:
                if not _is_locked(error) or loop.time() > until_s:
                    raise
            except BaseException:
                call.cancel()
                raise
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LOCKED_MOST_PAUSE_S)

    async def _send(self, data: AsyncIterator[bytes], labels: Mapping[str, str]) -> None:
        common = {
            "ref": self._ref,
            "total": self._descriptor.size_bytes,
            "expected": str(self._descriptor.digest),
        }
        call, skip = await self._open(common)
        try:
            offset = 0
            async for block in data:
                for start in range(0, len(block), _WRITE_BYTES):
                    part = block[start : start + _WRITE_BYTES]
                    if offset + len(part) > skip:
                        fresh = part[max(0, skip - offset) :]
                        await self._ask(
                            call,
                            content_pb2.WriteContentRequest(
                                action=content_pb2.WRITE,
                                offset=offset + len(part) - len(fresh),
                                data=fresh,
                                **common,
                            ),
                        )
                    offset += len(part)
            await self._ask(
                call,
                content_pb2.WriteContentRequest(
                    action=content_pb2.COMMIT,
                    offset=offset,
                    labels=dict(labels),
                    **common,
                ),
            )
            await call.done_writing()
        finally:
            call.cancel()

    async def _ask(
        self, call: Any, request: content_pb2.WriteContentRequest
    ) -> content_pb2.WriteContentResponse:
        """Send one message and wait for its answer."""
        doing = f"writing {self._descriptor.digest} to containerd"
        async with within(self._message_s, doing):
            await call.write(request)
            reply = await call.read()
        if not isinstance(reply, content_pb2.WriteContentResponse):
            raise UnavailableError(f"{doing}: it ended the write without an answer")
        return reply


def _is_locked(error: grpc.aio.AioRpcError) -> bool:
    return error.code() == grpc.StatusCode.UNAVAILABLE and "locked" in str(error.details())
