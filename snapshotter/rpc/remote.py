"""Errors of services that Ember calls, as its own: the opposite direction of status.py."""

from __future__ import annotations

import grpc

from snapshotter import errors

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
    return kind(f"{doing}: {error.details() or error.code().name}")
