"""Sizes that well-kept code of this field holds to: files, functions, lines, opening words."""

from __future__ import annotations

import ast
import re

from tests.tidy.sources import functions, python_sources, sources

FILE_LINES = 700
USUAL_FILE_LINES = 370
FUNCTION_LINES = 70
LINE_CHARACTERS = 100
DOCSTRING_LINES = 12
SHORT_MODULE_LINES = 60
CODE = (".py", ".c", ".h", ".go", ".sh", ".proto")


def code() -> list[tuple[str, list[str]]]:
    return [(s.name, s.lines) for s in sources() if s.name.endswith(CODE) or "." not in s.name]


def test_no_file_is_longer_than_the_limit() -> None:
    long = [f"{name}: {len(lines)} lines" for name, lines in code() if len(lines) > FILE_LINES]
    assert not long


def test_all_but_one_file_in_a_hundred_are_of_the_usual_size() -> None:
    files = code()
    long = [f"{name}: {len(lines)} lines" for name, lines in files if len(lines) > USUAL_FILE_LINES]
    assert len(long) <= len(files) / 100, long


def test_lines_fit_the_page() -> None:
    wide = [
        f"{name}:{number}: {len(line)} characters"
        for name, lines in code()
        for number, line in enumerate(lines, 1)
        if len(line.expandtabs(4)) > LINE_CHARACTERS and "http" not in line
    ]
    assert not wide


def test_lines_end_clean() -> None:
    faults = [
        f"{source.name}:{number}"
        for source in sources()
        for number, line in enumerate(source.text.split("\n"), 1)
        if line != line.rstrip() or "\r" in line
    ]
    faults += [
        f"{source.name}: ends without one newline"
        for source in sources()
        if source.text and (not source.text.endswith("\n") or source.text.endswith("\n\n"))
    ]
    assert not faults


def test_python_functions_are_short() -> None:
    long = [
        f"{source.name}:{node.lineno}: {node.name} has {span} lines"
        for source in python_sources()
        for node in functions(source)
        if (span := (node.end_lineno or node.lineno) - node.lineno + 1) >= FUNCTION_LINES
    ]
    assert not long


def test_c_and_go_functions_are_short() -> None:
    long = []
    for source in sources():
        if not (source.is_c or source.name.endswith(".go")):
            continue
        start = 0
        for number, line in enumerate(source.lines, 1):
            if line == "{" or (re.match(r"(func|static|int|void)\b.*\{$", line)):
                start = number
            elif line == "}" and start:
                if number - start + 1 >= FUNCTION_LINES:
                    long.append(f"{source.name}:{start}: {number - start + 1} lines")
                start = 0
    assert not long


def test_modules_open_with_their_purpose_and_invariant() -> None:
    faults = []
    for source in python_sources():
        words = ast.get_docstring(source.tree())
        written = [line for line in (words or "").splitlines() if line.strip()]
        if not source.text.strip():
            continue
        if not written:
            faults.append(f"{source.name}: no docstring")
        elif len(written) > DOCSTRING_LINES:
            faults.append(f"{source.name}: {len(written)} lines of docstring, at most 12")
        elif len(written) < 2 and not source.is_test and len(source.lines) > SHORT_MODULE_LINES:
            faults.append(f"{source.name}: one line of docstring; say the invariant too")
    assert not faults


def test_c_files_open_with_their_purpose() -> None:
    bare = [
        source.name
        for source in sources()
        if source.is_c
        and len(source.lines) > 10
        and not source.text.lstrip().startswith(("/*", "//"))
    ]
    assert not bare
