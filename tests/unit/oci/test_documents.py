"""The door through which documents enter: JSON that everybody reads in one way, or none."""

from __future__ import annotations

import pytest

from snapshotter.errors import RefusedError
from snapshotter.oci.documents import parse_object


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'"text"',
        b'{"a": 1, "a": 2}',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": ' * 100_000,
        b'{"a": "\\ud800"}',
        b'{"a": "\\udc00\\ud800"}',
        b'{"\\uDFFF": 1}',
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": "\xff"}',
        '{"a": "b"}'.encode("utf-16"),
        b'\xef\xbb\xbf{"a": 1}',
        b'{"a": 1}{}',
        b'{"a": ' + b"1" * 5000 + b"}",
    ],
)
def test_what_two_readers_might_read_in_two_ways_is_refused(data: bytes) -> None:
    with pytest.raises(RefusedError, match="it: "):
        parse_object(data, "it")


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b'{"a": "\\ud83d\\ude00"}', "\U0001f600"),
        ('{"a": "ä€"}'.encode(), "ä€"),
        (b'{"a": "\\\\ud800"}', "\\ud800"),
    ],
)
def test_whole_text_is_taken(data: bytes, value: str) -> None:
    assert parse_object(data, "it") == {"a": value}
