"""Imports: at the top of a module, and without a circle.

The floors themselves are held by import-linter; it reads whole packages only, and does not see
an import that hides inside a function.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.tidy.sources import PACKAGES, Source, functions, python_sources


def packaged() -> list[Source]:
    return [s for s in python_sources() if s.name.startswith((*PACKAGES, "bench"))]


def module_name(source: Source) -> str:
    return source.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(source: Source, modules: set[str]) -> Iterator[str]:
    """Modules of ours that ``source`` needs when it is loaded (not those for type checks only)."""
    package = module_name(source).split(".")
    if not source.name.endswith("__init__.py"):
        package = package[:-1]
    for node in source.tree().body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{start}.{alias.name}"
                yield inner if inner in modules else start


def test_no_import_hides_inside_a_function() -> None:
    hidden = [
        f"{source.name}:{inner.lineno}"
        for source in python_sources()
        for function in functions(source)
        for inner in ast.walk(function)
        if isinstance(inner, ast.Import | ast.ImportFrom)
    ]
    assert not hidden


def test_no_modules_import_each_other_in_a_circle() -> None:
    names = {module_name(source) for source in packaged()}
    graph = {
        module_name(source): set(imported(source, names)) & names - {module_name(source)}
        for source in packaged()
    }
    circles = []
    while True:  # take away, again and again, what imports nothing that is left
        free = [name for name, needs in graph.items() if not needs & graph.keys()]
        if not free:
            break
        for name in free:
            del graph[name]
    circles = sorted(graph)
    assert not circles, f"in a circle, or above one: {circles}"


def test_http_goes_through_one_client() -> None:
    clients = {"aiohttp", "h2", "http.client", "urllib.request", "httpx", "requests", "urllib3"}
    knows = {f"snapshotter.oci.{name}" for name in ("http1", "http2", "http2_frames")}
    found = {
        (module_name(source), name)
        for source in python_sources()
        if source.name.startswith(PACKAGES)
        for node in ast.walk(source.tree())
        for name in _named(node)
        if any(name == client or name.startswith(f"{client}.") for client in clients)
    }
    assert {module for module, _ in found} == knows, found


def _named(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []
