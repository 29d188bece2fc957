"""The node's own platform is chosen, or what runs on it."""

from __future__ import annotations

import pytest

from snapshotter.errors import InvalidArgumentError
from snapshotter.oci.platform import Platform, host_platform


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("linux/amd64", "linux/amd64"),
        ("Linux/x86_64", "linux/amd64"),
        ("linux/amd64/v1", "linux/amd64"),
        ("linux/aarch64", "linux/arm64"),
        ("linux/arm64/v8", "linux/arm64"),
        ("linux/arm64/8", "linux/arm64"),
        ("linux/armhf", "linux/arm"),
        ("linux/armel", "linux/arm/v6"),
        ("linux/i686", "linux/386"),
        ("linux/riscv64", "linux/riscv64"),
    ],
)
def test_names_found_in_the_wild_are_brought_to_one(text: str, normal: str) -> None:
    assert str(Platform.parse(text)) == normal


@pytest.mark.parametrize("text", ["", "linux", "linux/", "/amd64", "linux/arm/v7/extra"])
def test_what_is_no_platform_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        Platform.parse(text)


@pytest.mark.parametrize(
    ("mine", "offered", "rank"),
    [
        ("linux/amd64", "linux/amd64", 0),
        ("linux/amd64", "linux/amd64/v2", None),
        ("linux/amd64/v3", "linux/amd64/v2", 1),
        ("linux/amd64/v3", "linux/amd64", 2),
        ("linux/arm/v7", "linux/arm/v6", 1),
        ("linux/arm/v7", "linux/arm/v5", 2),
        ("linux/arm/v7", "linux/arm/v8", None),
        ("linux/arm64", "linux/arm/v7", None),
        ("linux/arm64", "linux/arm64/v9", None),
        ("linux/amd64", "windows/amd64", None),
        ("linux/amd64", "unknown/unknown", None),
        ("linux/s390x", "linux/s390x", 0),
        ("linux/s390x", "linux/s390x/odd", None),
        ("linux/arm/v7", "linux/arm/strange", None),
    ],
)
def test_an_older_variant_runs_and_a_newer_one_does_not(
    mine: str, offered: str, rank: int | None
) -> None:
    assert Platform.parse(mine).rank(Platform.parse(offered)) == rank


def test_this_machine_is_linux() -> None:
    assert host_platform().os == "linux"
    assert host_platform().rank(host_platform()) == 0
