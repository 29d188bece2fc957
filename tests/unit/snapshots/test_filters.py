"""What must hold of List's filters: the language of containerd's pkg/filters."""

from __future__ import annotations

import pytest

from snapshotter.errors import InvalidArgumentError
from snapshotter.snapshots.filters import parse
from snapshotter.snapshots.model import Info, Kind

REF = "containerd.io/snapshot.ref"
INFO = Info(
    "default/7/a b", "sha256:p", Kind.ACTIVE, 1, 2, {"l": "2", REF: "sha256:aa", "a.b": "x,y"}
)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kind==active",
        "kind!=view",
        "kind!=committed,labels.l==2",
        'labels."containerd.io/snapshot.ref"==sha256:aa,parent=="sha256:p"',
        "labels.l",
        "labels.a.b",
        'labels."a.b"=="x,y"',
        r'labels."a.b"=="x\x2cy"',
        r'labels."a.b"=="x\054y"',
        r'labels."a.b"=="\u0078,y"',
        'name=="default/7/a b"',
        "name~=/^default/",
        r"name ~= |\\d/a b$|",
        r"name~=^d\w+",
        'name~="7"',
        "name~=^default",
        "parent",
        "name",
        'parent!=""',
        'labels.absent!="x"',
        'labels.absent~="^$"',
        "kind == active, labels.l == 2",
        r"name~=/^default\/7\//",
    ],
)
def test_filters_that_match(text: str) -> None:
    assert parse([text]).matches(INFO)


@pytest.mark.parametrize(
    "text",
    [
        "kind==Active",
        "kind==committed",
        "labels.l==3",
        "labels.absent",
        'labels.absent==""',
        "labels",
        "unknown",
        'unknown==""',
        "kind==active,labels.l==3",
        "name~=/^active/",
        'parent==""',
        r"name~=/^\\w+$/",
    ],
)
def test_filters_that_do_not_match(text: str) -> None:
    assert not parse([text]).matches(INFO)


@pytest.mark.parametrize(
    "text",
    [
        "kind=active",
        "kind==",
        "kind===active",
        "==active",
        ",",
        "kind==active,",
        r"name~=/\d/",
        "name==/default/",
        "name==|default|",
        'name=="open',
        'name=="line\nbreak"',
        r'name=="\q"',
        r'name=="\x4"',
        r'name=="\400"',
        r'name=="\ud800"',
        "name~=/(/",
        r"name~=/(a)\1/",
        r'name~="\xff("',
        "labels.",
        "labels..l",
        "name==a b",
        "name==.a",
        "name~=/" + "a" * 2000 + "/",
        "name==" + "a" * 20_000,
        "näme==x",
        "name==a\0b",
    ],
)
def test_filters_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        parse([text])


def test_several_filters_are_alternatives_and_none_match_everything() -> None:
    assert parse([]).matches(INFO)
    assert parse(["name==x", "labels.l==2"]).matches(INFO)
    assert not parse(["name==x", "labels.l==3"]).matches(INFO)


def test_a_fault_is_shown_at_its_place() -> None:
    with pytest.raises(InvalidArgumentError, match=r"\[kind >\|=\|< active\]"):
        parse(["kind=active"])


def test_go_and_python_agree_on_what_a_digit_is() -> None:
    arabic = Info("٣", "", Kind.VIEW, 1, 1, {})
    assert not parse([r"name~=\d"]).matches(arabic)
    assert parse([r"name~=^.\z"]).matches(arabic)


def test_no_expression_takes_longer_than_the_text_is_long() -> None:
    """A backtracking matcher would need 2^64 steps for this, and hold up every reader."""
    long = Info("a" * 64 + "!", "", Kind.VIEW, 1, 1, {})
    assert not parse(['name~="(a+)+$"']).matches(long)
    assert not parse(['name~="(a|aa)+$"']).matches(long)
    assert parse(['name~="(a+)+!$"']).matches(long)
