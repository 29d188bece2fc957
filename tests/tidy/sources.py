"""The source files that the tidy tests read: found in the tree, never by asking git.

A release tarball has no git state, and a new file counts before it is committed. Generated and
ignored folders are left out here, once.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ioengine", "snapshotter", "gds")
FOLDERS = (*PACKAGES, "bench", "deploy", "proto", "systemd", "tests", ".ci")
GENERATED = ("snapshotter/rpc/pb", "tests/c/bin", "ioengine/_native.c")
SUFFIXES = (".py", ".c", ".h", ".go", ".sh", ".proto", ".toml", ".service", ".socket", ".yaml")


@dataclass(frozen=True)
class Source:
    name: str
    text: str

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def is_python(self) -> bool:
        return self.name.endswith(".py")

    @property
    def is_test(self) -> bool:
        return self.name.startswith("tests/")

    @property
    def is_c(self) -> bool:
        return self.name.endswith((".c", ".h"))

    def tree(self) -> ast.Module:
        return parse(self)


@cache
def parse(source: Source) -> ast.Module:
    return ast.parse(source.text, source.name)


def found() -> Iterator[Path]:
    for path in ROOT.iterdir():
        if path.is_file():
            yield path
    for folder in FOLDERS:
        yield from (path for path in (ROOT / folder).rglob("*") if path.is_file())


@cache
def sources() -> tuple[Source, ...]:
    """All source files: by suffix, or a script that says so in its first line."""
    result = []
    for path in sorted(found()):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(GENERATED) or "__pycache__" in name:
            continue
        if path.suffix in SUFFIXES or name == "Makefile" or is_script(path):
            result.append(Source(name, path.read_text()))
    return tuple(result)


def is_script(path: Path) -> bool:
    if path.suffix:
        return False
    with path.open("rb") as file:
        return file.read(2) == b"#!"


def python_sources() -> list[Source]:
    return [source for source in sources() if source.is_python]


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(source.tree()):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
