"""Errors of services that Ember calls, as its own: the opposite direction of status.py."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc

from snapshotter import errors
from snapshotter.oci.exchange import without_queries
from snapshotter.rpc.http2.channel import NO_CONNECTION

_CLASSES: dict[grpc.StatusCode, type[errors.EmberError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgumentError,
    grpc.StatusCode.NOT_FOUND: errors.NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExistsError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.FailedPreconditionError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineError,
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.NoSpaceError,
    grpc.StatusCode.DATA_LOSS: errors.CorruptError,
    grpc.StatusCode.UNAUTHENTICATED: errors.UnauthorizedError,
    grpc.StatusCode.PERMISSION_DENIED: errors.UnauthorizedError,
}


def error_from_rpc(error: grpc.aio.AioRpcError, doing: str) -> errors.EmberError:
    """The error class that fits the code; the message says what was being done."""
    kind = _CLASSES.get(error.code(), errors.EmberError)
    return kind(f"{doing}: {_words(error)}")


@contextlib.asynccontextmanager
async def within(limit_s: float, doing: str) -> AsyncIterator[None]:
    """DeadlineError if the block takes longer."""
    try:
        async with asyncio.timeout(limit_s) as deadline:
            yield
    except TimeoutError:
        if not deadline.expired():
            raise
        raise errors.DeadlineError(f"{doing}: no answer within {limit_s:g} s") from None


def _words(error: grpc.aio.AioRpcError) -> str:
    """What the service said, or in a few words that there is none."""
    details = error.details() or error.code().name
    if error.code() == grpc.StatusCode.UNAVAILABLE and details.startswith(NO_CONNECTION):
        return f"nobody answers ({details.rpartition(': ')[2]})"
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED and details == "Deadline Exceeded":
        return "no answer in time"
    return without_queries(details)  # containerd names whole links, signatures included
