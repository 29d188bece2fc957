"""What can go wrong, in few classes: each says whether trying again may help.

The classes follow gRPC status codes where containerd acts on the difference; the edge (rpc/) maps
them one to one. A message names the thing, what is wrong with it and, where there is one, the way
out.
"""

from __future__ import annotations

import copy
from typing import TypeVar


class EmberError(Exception):
    """Base of all errors that Ember raises on purpose."""

    retryable = False


class InvalidArgumentError(EmberError):
    """The caller's request makes no sense, however often it is repeated."""


class NotFoundError(EmberError):
    """The named thing does not exist here."""


class AlreadyExistsError(EmberError):
    """The named thing exists; for a layer: it is here and need not be unpacked."""


class FailedPreconditionError(EmberError):
    """The thing exists but its state forbids the operation."""


class UnavailableError(EmberError):
    """Something needed is out of reach for now (network, registry, peer, helper process)."""

    retryable = True


class BusyError(UnavailableError):
    """The other side asked to come back after ``retry_after_s`` seconds (None: it did not say)."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineError(UnavailableError):
    """No answer within the time that was allowed."""


class UnauthorizedError(EmberError):
    """Credentials are missing, expired or refused, and refreshing them did not help."""


class NoSpaceError(EmberError):
    """The cache's file system or budget is full."""

    retryable = True


class CorruptError(EmberError):
    """Bytes that came from outside do not match what was promised (digest, length, range)."""

    retryable = True


class RangeUnsupportedError(CorruptError):
    """The origin does not serve parts of this blob; it may still be read whole, once."""

    retryable = False


class LengthError(CorruptError):
    """The origin has the blob in another length than was promised; it will be so again."""

    retryable = False


class RefusedError(EmberError):
    """Malformed or hostile input that will never be accepted; names the fault and its place."""


class ConfigError(EmberError):
    """A configuration file or command line that cannot be used; names file and key."""


E = TypeVar("E", bound=EmberError)


def restated(error: E) -> E:
    """The same error anew, to be kept or to be raised once more.

    One that was raised holds every frame that it came through and all that those know. Kept by one
    of them it is a circle, and what is in it (a layer's open index) goes at some distant time.
    """
    return copy.copy(error)
