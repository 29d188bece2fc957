"""Statuses fit into a header, however long and in whatever script the message is."""

from __future__ import annotations

from urllib.parse import quote

import grpc
import pytest

from snapshotter.errors import InvalidArgumentError
from snapshotter.rpc.status import MAX_STATUS_BYTES, status_of


@pytest.mark.parametrize("letter", ["a", "ü", "層", "%", "\x00", "\ud800"])
def test_a_long_message_is_cut_to_what_a_header_holds(letter: str) -> None:
    code, message = status_of(InvalidArgumentError(f"key {letter * 20_000}"), "View")
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message.startswith("key " + letter)
    assert len(quote(message, safe=" ", errors="replace")) <= 3 * MAX_STATUS_BYTES // 2


def test_a_message_that_fits_is_left_alone() -> None:
    _, message = status_of(InvalidArgumentError("key 'ü' is 100% wrong"), "View")
    assert message == "key 'ü' is 100% wrong"
