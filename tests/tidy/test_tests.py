"""Rules for the tests themselves: each asserts, none sleeps, none is skipped but for a GPU."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.tidy.sources import Source, functions, python_sources

SKIPS = {"skip", "skipif", "xfail", "importorskip"}
CHECKS = re.compile(r"^_?(assert|check|expect|raises|fail|verify|compare|must|same)")


def files_of_tests() -> list[Source]:
    return [source for source in python_sources() if source.is_test]


def called_names(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            if isinstance(inner.func, ast.Attribute):
                yield inner.func.attr
            elif isinstance(inner.func, ast.Name):
                yield inner.func.id


def asserts(node: ast.AST) -> bool:
    if any(isinstance(inner, ast.Assert) for inner in ast.walk(node)):
        return True
    return any(CHECKS.match(name) for name in called_names(node))


def test_every_test_asserts_something() -> None:
    idle = [
        f"{source.name}:{node.lineno}: {node.name}"
        for source in files_of_tests()
        if source.name.rsplit("/", 1)[-1].startswith("test_")
        for node in functions(source)
        if node.name.startswith("test_") and not asserts(node)
    ]
    assert not idle


def test_only_tests_of_a_gpu_may_be_skipped() -> None:
    skipped = [
        f"{source.name}:{node.lineno}: {node.attr}"
        for source in files_of_tests()
        if not source.name.startswith("tests/gpu/")
        for node in ast.walk(source.tree())
        if isinstance(node, ast.Attribute) and node.attr in SKIPS
        if isinstance(node.value, ast.Name | ast.Attribute)
        and (getattr(node.value, "id", "") == "pytest" or getattr(node.value, "attr", "") == "mark")
    ]
    assert not skipped


def test_unit_tests_do_not_sleep() -> None:
    """A fake clock instead; ``asyncio.sleep(0)`` only lets others run and is fine."""
    sleeping = [
        f"{source.name}:{node.lineno}"
        for source in files_of_tests()
        if source.name.startswith("tests/unit/")
        for node in ast.walk(source.tree())
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "sleep"
        and getattr(node.func.value, "id", "") in {"time", "asyncio"}
        and not (node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0)
    ]
    assert not sleeping


def test_no_test_uses_a_mocking_library() -> None:
    mocking = [
        source.name
        for source in files_of_tests()
        if re.search(r"^\s*(from|import) (unittest\.mock|mock|pytest_mock)\b", source.text, re.M)
    ]
    assert not mocking
