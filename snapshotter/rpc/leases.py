"""The leases that keep what a pull has brought so far out of containerd's garbage collection.

A lease ends with its pull. One that could not be ended then, since containerd was away or this
daemon died, is ended later: every lease that bears our mark and is of no pull under way is a
leftover, since a cache has one daemon at a time. Those of others are never touched.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from snapshotter.clock import Clock
from snapshotter.errors import EmberError
from snapshotter.rpc.blob_writer import metadata_for
from snapshotter.rpc.containerd import Containerd
from snapshotter.rpc.pb.containerd.services.leases.v1 import leases_pb2, leases_pb2_grpc
from snapshotter.rpc.remote import error_from_rpc
from snapshotter.tasks import end_all

log = logging.getLogger(__name__)

OWNER = "ember/pull-of"
"""The label that says whose a lease is."""
LEASE_SECONDS = 24 * 3600
CALL_S = 30.0
FIRST_PAUSE_S = 1.0
MOST_PAUSE_S = 30.0


class PullLeases:
    """Life story: ``start``, ``hold`` for each pull, ``stop``. ``owner`` names the cache."""

    def __init__(self, containerd: Containerd, owner: str, clock: Clock) -> None:
        self._containerd = containerd
        self._owner = owner
        self._clock = clock
        self._stub = leases_pb2_grpc.LeasesStub(containerd.channel)
        self._living: set[str] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._awake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """End what earlier daemons left, in the background and as soon as containerd answers."""
        self._awake.set()
        self._task = asyncio.create_task(self._run(), name="end leftover leases")

    async def stop(self) -> None:
        """Stop looking for leftovers; what is left then the next daemon finds."""
        await end_all([self._task])

    @asynccontextmanager
    async def hold(self, namespace: str) -> AsyncIterator[str]:
        """A new lease in ``namespace``, ended with the block however that ends."""
        lease = f"ember-pull-{secrets.token_hex(8)}"
        self._living.add(lease)
        # Not cut short: containerd may make it after all, and after we had it deleted.
        creating = asyncio.create_task(self._create(namespace, lease))
        try:
            await asyncio.shield(creating)
            yield lease
        finally:
            ending = asyncio.create_task(self._end(namespace, lease, creating))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            await asyncio.shield(ending)

    async def _end(self, namespace: str, lease: str, creating: asyncio.Task[None]) -> None:
        await asyncio.gather(creating, return_exceptions=True)
        self._living.discard(lease)
        try:
            await self._delete(namespace, lease)
        except EmberError as error:
            log.warning("%s; it is ended later", error)
            self._awake.set()

    async def _run(self) -> None:
        while True:
            await self._awake.wait()
            self._awake.clear()
            pause_s = FIRST_PAUSE_S
            while not await self._sweep():
                await self._clock.sleep(pause_s)
                pause_s = min(2 * pause_s, MOST_PAUSE_S)

    async def _sweep(self) -> bool:
        """End the leftovers of all namespaces; False if containerd has to be asked again."""
        try:
            for namespace in await self._containerd.namespaces():
                for lease in await self._ours(namespace):
                    if lease not in self._living:
                        await self._delete(namespace, lease)
                        log.info("lease %s of a pull that was cut short is ended", lease)
        except EmberError as error:
            log.debug("leftover leases are looked for again: %s", error)
            return False
        except Exception:
            log.exception("looking for leftover leases failed; it is tried again")
            return False
        return True

    async def _ours(self, namespace: str) -> list[str]:
        request = leases_pb2.ListRequest(filters=[f'labels."{OWNER}"=={json.dumps(self._owner)}'])
        meta = metadata_for(namespace)
        try:
            reply = await self._stub.List(request, metadata=meta, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"leases of namespace {namespace}") from None
        return [lease.id for lease in reply.leases if lease.labels.get(OWNER) == self._owner]

    async def _create(self, namespace: str, lease: str) -> None:
        expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + LEASE_SECONDS))
        labels = {"containerd.io/gc.expire": expires, OWNER: self._owner}
        request = leases_pb2.CreateRequest(id=lease, labels=labels)
        try:
            await self._stub.Create(request, metadata=metadata_for(namespace), timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"lease {lease}") from None

    async def _delete(self, namespace: str, lease: str) -> None:
        """Drop the lease; one that is gone already is fine."""
        request = leases_pb2.DeleteRequest(id=lease)
        try:
            await self._stub.Delete(request, metadata=metadata_for(namespace), timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:
                raise error_from_rpc(error, f"lease {lease}") from None
