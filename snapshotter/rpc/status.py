"""Errors of the daemon <-> gRPC codes, one to one where containerd acts on the difference.

The client sees the message of an error that Ember raised on purpose; of any other only that the log
has more: never a traceback.
"""

from __future__ import annotations

import errno
import logging

import grpc

from snapshotter import errors

_log = logging.getLogger(__name__)

# The first class that fits counts: subclasses stand before their bases.
_CODES: tuple[tuple[type[errors.EmberError], grpc.StatusCode], ...] = (
    (errors.InvalidArgumentError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.NotFoundError, grpc.StatusCode.NOT_FOUND),
    (errors.AlreadyExistsError, grpc.StatusCode.ALREADY_EXISTS),
    (errors.FailedPreconditionError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (errors.UnauthorizedError, grpc.StatusCode.UNAUTHENTICATED),
    (errors.NoSpaceError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.CorruptError, grpc.StatusCode.DATA_LOSS),
    (errors.RefusedError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.ConfigError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.EmberError, grpc.StatusCode.INTERNAL),
)


MAX_STATUS_BYTES = 4000
"""A status travels in a header, and headers of some 8 KiB break the whole call."""
_ENCODED_BYTES = 3
"""What a byte outside printable ASCII takes in a header (percent-encoded, gRPC over HTTP/2)."""


def status_of(error: Exception, verb: str) -> tuple[grpc.StatusCode, str]:
    """The code and the message that the client gets; logs what it does not get."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code, _fitting(str(error))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        _log.error("%s: %s", verb, error)
        return grpc.StatusCode.RESOURCE_EXHAUSTED, f"{verb}: no space left for {error.filename}"
    _log.error("%s failed unexpectedly", verb, exc_info=error)
    return (
        grpc.StatusCode.INTERNAL,
        f"{verb} failed inside Ember ({type(error).__name__}); see its log",
    )


def _fitting(message: str) -> str:
    """As much of a message as a header holds."""
    room = MAX_STATUS_BYTES
    for number, character in enumerate(message):
        plain = " " <= character <= "~" and character != "%"
        room -= 1 if plain else _ENCODED_BYTES * len(character.encode(errors="replace"))
        if room < 0:
            return message[:number] + "…"
    return message
