"""Rules for the tests themselves: each asserts, none sleeps, none is skipped but for a GPU."""

from __future__ import annotations

import ast
import re

from tests.tidy.sources import Source, functions, python_sources

SKIPS = {"skip", "skipif", "xfail", "importorskip"}
MAY_SLEEP = {
    "tests/patience.py": "looks again and again for what it waits for",
    "tests/fakes/http_server.py": "a server that sends slowly",
    "tests/fakes/short_clock.py": "a clock: its pauses are what is tested",
    "tests/fakes/http2_wire.py": "the same over HTTP/2",
    "tests/tools/run_tests.py": "not a test: gives what it ends a moment",
}


def files_of_tests() -> list[Source]:
    return [source for source in python_sources() if source.is_test]


def asserts(node: ast.AST) -> bool:
    """An assertion that can fail, or ``pytest.raises``: what a helper is called proves nothing."""
    return any(
        (isinstance(inner, ast.Assert) and not isinstance(inner.test, ast.Constant))
        or (isinstance(inner, ast.Attribute) and ast.unparse(inner) == "pytest.raises")
        for inner in ast.walk(node)
    )


def sleeps(node: ast.AST) -> bool:
    """``asyncio.sleep(0)`` only lets others run and is fine."""
    if isinstance(node, ast.ImportFrom):
        return node.module in {"time", "asyncio"} and any(n.name == "sleep" for n in node.names)
    if not isinstance(node, ast.Call) or ast.unparse(node.func) not in {
        "time.sleep",
        "asyncio.sleep",
    }:
        return False
    return not (node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0)


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


def test_no_test_sleeps_but_waits_for_what_it_needs() -> None:
    """A fake clock, or tests/patience.py for what another process does."""
    sleeping = [
        f"{source.name}:{node.lineno}"
        for source in files_of_tests()
        if source.name not in MAY_SLEEP
        for node in ast.walk(source.tree())
        if isinstance(node, ast.Call | ast.ImportFrom) and sleeps(node)
    ]
    assert not sleeping


def test_no_test_uses_a_mocking_library() -> None:
    mocking = [
        source.name
        for source in files_of_tests()
        if re.search(r"^\s*(from|import) (unittest\.mock|mock|pytest_mock)\b", source.text, re.M)
    ]
    assert not mocking
