"""Challenges are read in all the forms that RFC 9110 allows, and in those it does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotter.oci.challenge import Challenge, choose, parse_challenges

BEARER = Challenge("bearer", "https://auth.example/token", "registry", "repository:a/b:pull")


@pytest.mark.parametrize(
    "text",
    [
        'Bearer realm="https://auth.example/token",service="registry",scope="repository:a/b:pull"',
        'bearer  REALM = "https://auth.example/token" , Service=registry,'
        ' scope="repository:a/b:pull", error="invalid_token"',
        'Bearer scope="repository:a/b:pull",realm="https:\\/\\/auth.example/token",'
        'service="registry",realm="https://evil.example"',
    ],
)
def test_a_bearer_challenge_is_read(text: str) -> None:
    assert parse_challenges([text]) == [BEARER]


def test_several_challenges_may_share_a_header() -> None:
    both = 'Basic realm="x", Bearer realm="https://auth.example/token"'
    assert [c.scheme for c in parse_challenges([both])] == ["basic", "bearer"]
    assert [c.scheme for c in parse_challenges(["Negotiate", both])] == [
        "negotiate",
        "basic",
        "bearer",
    ]


def test_a_bearer_with_a_realm_is_chosen_before_basic() -> None:
    assert choose(parse_challenges(['Basic realm="x"', 'Bearer realm="https://a"'])) == Challenge(
        "bearer", "https://a"
    )
    assert choose(parse_challenges(["Basic", "Bearer"])) == Challenge("basic")
    assert choose(parse_challenges(["Negotiate", "Bearer"])) is None
    assert choose([]) is None


@given(st.text(max_size=200))
def test_any_text_is_survived(text: str) -> None:
    assert all(c.scheme == c.scheme.lower() for c in parse_challenges([text, f"Bearer {text}"]))
