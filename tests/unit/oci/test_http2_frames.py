"""GOAWAY is found wherever the bytes are cut, and all else goes on as it came."""

from __future__ import annotations

import pytest
from h2.exceptions import FrameTooLargeError
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, PingFrame
from hypothesis import given
from hypothesis import strategies as st

from snapshotter.oci.http2_frames import FrameSplitter, GoAway

TOO_SHORT = b"\0\0\4\7\0\0\0\0\0four"
"""A GOAWAY that cannot be one: the protocol library has to say so."""


def going(last: int, code: int, more: bytes) -> Frame:
    frame = GoAwayFrame(0)
    frame.last_stream_id, frame.error_code, frame.additional_data = last, code, more
    return frame


FRAMES = st.one_of(
    st.binary(max_size=50).map(lambda data: DataFrame(1, data).serialize()),
    st.just(PingFrame(0, b"12345678").serialize()),
    st.just(TOO_SHORT),
    st.builds(
        lambda last, code, more: going(last, code, more).serialize(),
        st.integers(0, 2**31 - 1),
        st.integers(0, 13),
        st.binary(max_size=20),
    ),
)


def is_goaway(frame: bytes) -> bool:
    return frame[3] == 7 and frame != TOO_SHORT


@given(st.lists(FRAMES, max_size=8), st.lists(st.integers(1, 40), max_size=30))
def test_each_goaway_comes_out_in_its_place_and_the_rest_as_it_was(
    frames: list[bytes], cuts: list[int]
) -> None:
    data = b"".join(frames)
    splitter = FrameSplitter(16384)
    came: list[bytes | GoAway] = []
    at = 0
    for cut in [*cuts, len(data)]:
        came += splitter.split(data[at : at + cut])
        at += cut
    wanted: list[bytes | GoAway] = []
    for frame in frames:
        if is_goaway(frame):
            last, code = frame[9:13], frame[13:17]
            wanted.append(GoAway(int.from_bytes(last, "big"), int.from_bytes(code, "big")))
        else:
            wanted.append(frame)
    assert joined(came) == joined(wanted)


def joined(parts: list[bytes | GoAway]) -> list[bytes | GoAway]:
    """Neighbouring bytes as one, for they may be cut anywhere."""
    found: list[bytes | GoAway] = []
    for part in parts:
        if isinstance(part, bytes) and found and isinstance(found[-1], bytes):
            found[-1] += part
        elif part != b"":
            found.append(part)
    return found


def test_a_last_stream_number_has_no_reserved_bit() -> None:
    frame = bytearray(going(5, 0, b"").serialize())
    frame[9] |= 0x80
    assert list(FrameSplitter(16384).split(bytes(frame))) == [GoAway(5, 0)]


def test_nobody_waits_for_the_end_of_a_frame_that_is_too_long() -> None:
    with pytest.raises(FrameTooLargeError):
        list(FrameSplitter(16384).split(b"HTTP/1.1 400 Bad Request"))
