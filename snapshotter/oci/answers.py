"""What an answer's head means: statuses and range headers turned into errors or let through.

The rules of an origin's ranges are strict, since a wrong range would be wrong bytes of a file:
206, exactly the Content-Range that was asked for, identity encoding. Pure but for the reading of
error bodies, which are the registry's words: bounded, quoted, never trusted.
"""

from __future__ import annotations

import json
import re

from snapshotter.content import Extent
from snapshotter.errors import (
    CorruptError,
    EmberError,
    LengthError,
    NotFoundError,
    RangeUnsupportedError,
    UnauthorizedError,
    UnavailableError,
)
from snapshotter.oci.exchange import Response, read_body

_ERROR_BODY_LIMIT_BYTES = 16 * 1024
_CERTIFICATE_WANTED = b"SSL certificate"
"""In nginx's pages for a client that has shown no certificate, or none that it takes."""
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)", re.ASCII)


async def error_for(response: Response, what: str) -> EmberError:
    """The error that a status other than success stands for. Uses up the response."""
    status = response.status
    body = await _body_of(response)
    if status == 400 and _CERTIFICATE_WANTED in body:
        return UnauthorizedError(
            f"{what}: answered 400: the server lets in none without a client certificate that it"
            " knows; 'client' in hosts.toml names one"
        )
    message = f"{what}: answered {status}{_words_of(body, response)}"
    if status in (404, 410):
        return NotFoundError(message)
    if status in (401, 403):
        return UnauthorizedError(message)
    return UnavailableError(message)


async def _body_of(response: Response) -> bytes:
    """The beginning of an error's body; nothing if it breaks off or is too long for one."""
    try:
        return await read_body(response, _ERROR_BODY_LIMIT_BYTES) or b""
    except UnavailableError:
        return b""


def _words_of(body: bytes, response: Response) -> str:
    """``: CODE message`` out of an error body (distribution-spec, "Error Codes"), or nothing."""
    try:
        errors = json.loads(body or b"null")["errors"]
        words = " ".join(str(errors[0].get(key) or "") for key in ("code", "message"))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return ""
    return f" ({ascii(response.redacted(words).strip()[:200])[1:-1]})"


async def expect_range(response: Response, extent: Extent, size_bytes: int, what: str) -> None:
    """Return if the body will be exactly ``extent`` of a blob of ``size_bytes``; else raise.

    RangeUnsupportedError if the origin has no ranges (200, 400, 501), CorruptError for any other
    lie about the range. On an error the response is used up.
    """
    if response.status in (200, 400, 501):
        error = await error_for(response, what) if response.status == 400 else None
        await response.close()
        if isinstance(error, UnauthorizedError):
            raise error
        raise RangeUnsupportedError(f"{what}: a range was answered with {response.status}")
    if response.status == 416:
        told = response.redacted(response.headers.get("Content-Range", "nothing"))[:60]
        await response.close()
        raise CorruptError(
            f"{what}: no such range there ({told}); {size_bytes} bytes were promised"
        )
    if response.status != 206:
        raise await error_for(response, what)
    fault = _range_fault(response, extent, size_bytes)
    if fault is not None:
        await response.close()
        raise LengthError(f"{what}: {fault}")


def _range_fault(response: Response, extent: Extent, size_bytes: int) -> str | None:
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        return f"a range in the encoding {response.redacted(encoding)[:40]!r}"
    told = response.headers.get("Content-Range")
    if told is None:
        return "206 without Content-Range"
    match = _CONTENT_RANGE.fullmatch(told.strip())
    if match is None:
        return f"a malformed Content-Range {response.redacted(told)[:60]!r}"
    if (int(match[1]), int(match[2])) != (extent.offset, extent.end - 1):
        return f"bytes {extent.offset}-{extent.end - 1} were asked for, {told[:60]!r} came"
    if match[3] != "*" and int(match[3]) != size_bytes:
        return f"the blob has {match[3]} bytes there, {size_bytes} were promised"
    return _length_fault(response, extent.length)


def _length_fault(response: Response, length_bytes: int) -> str | None:
    told = response.headers.get("Content-Length")
    if told is not None and told.strip() != str(length_bytes):
        return f"a body of {told[:30]} bytes, {length_bytes} were promised"
    return None


async def expect_whole(response: Response, size_bytes: int, what: str) -> None:
    """Return if the body will be a whole blob of ``size_bytes``; else raise, response used up."""
    if response.status != 200:
        raise await error_for(response, what)
    fault = _length_fault(response, size_bytes)
    if fault is not None:
        await response.close()
        raise LengthError(f"{what}: {fault}")
