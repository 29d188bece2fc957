"""The documents as a reader uses them: their configuration snippets, and the commands they call."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(ember [^`]+)`")


@dataclass(frozen=True, slots=True)
class Snippet:
    """``kind`` is what the fence says; ``before`` the line of text that introduces it."""

    kind: str
    text: str
    before: str


def snippets(name: str) -> list[Snippet]:
    """The fenced blocks of ``docs/NAME.md`` in order."""
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        before = text[: match.start()].rstrip().rsplit("\n\n", 1)[-1]
        found.append(Snippet(match[1], match[2], before))
    return found


def snippet(name: str, words: str) -> str:
    """The only block of the page that is introduced with ``words``."""
    (found,) = [each.text for each in snippets(name) if words in each.before]
    return found


def shell_lines(path: Path) -> list[str]:
    """The lines of indented blocks: what a reader types, without its comments."""
    lines = []
    for block in path.read_text(encoding="utf-8").split("\n\n"):
        if all(line.startswith("    ") for line in block.splitlines()):
            lines += [line.partition("  #")[0].strip() for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def calls(path: Path) -> list[str]:
    """Every `ember …` that the page tells to call, in blocks and in sentences."""
    text = path.read_text(encoding="utf-8")
    typed = [line for line in shell_lines(path) if line.startswith("ember ")]
    return typed + [" ".join(match.split()) for match in _INLINE.findall(text)]
