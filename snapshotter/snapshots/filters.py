"""containerd's filter language for List: parsed once, matched against an Info. Pure.

A filter is selectors joined by "," (all must hold); several filters hold if any does. A selector
is a field path, alone (is it there?) or with "==", "!=" or "~=" (a regular expression, found
anywhere) and a value. Paths are joined by "."; parts and values may be quoted with double quotes,
values of "~=" also between slashes or pipes. The language is that of containerd's pkg/filters, and
its expressions are Go's: in time linear in the text, so that no List can hold up the daemon.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import re2

from snapshotter.errors import InvalidArgumentError
from snapshotter.snapshots.model import Info

MAX_FILTER_BYTES: Final = 16 * 1024
MAX_PATTERN_BYTES: Final = 1024

_FIELD = re.compile(r"[A-Za-z0-9_]+")
_OPERATOR = re.compile(r"[=!~]+")
_VALUE = re.compile(r"[^,\s\x00-\x1f\x7f]+")
_SPACE = re.compile(r"\s*")
_SIMPLE_ESCAPES = dict(zip("abfnrtv\\", "\a\b\f\n\r\t\v\\", strict=True))
_NUMERIC_ESCAPE = re.compile(r"[0-7]{3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}")
_QUIET = re2.Options()
_QUIET.log_errors = False


@dataclass(frozen=True, slots=True)
class Selector:
    """One condition. ``operator`` is "", "==", "!=" or "~="; "" asks for presence."""

    path: tuple[str, ...]
    operator: str = ""
    value: str = ""
    pattern: Any = None

    def matches(self, info: Info) -> bool:
        """Whether the condition holds; an absent field counts as "" for "!=" and "~="."""
        found = _field(info, self.path)
        if self.operator == "==":
            return found is not None and found == self.value
        if self.operator == "!=":
            return (found or "") != self.value
        if self.pattern is not None:
            return self.pattern.search(_bytes(found or "")) is not None
        return found is not None


@dataclass(frozen=True, slots=True)
class Filter:
    """Alternatives, each a list of conditions that must all hold; none at all match everything."""

    alternatives: tuple[tuple[Selector, ...], ...]

    def matches(self, info: Info) -> bool:
        if not self.alternatives:
            return True
        return any(all(one.matches(info) for one in every) for every in self.alternatives)


def parse(texts: Sequence[str]) -> Filter:
    """Parse the filters of a List; InvalidArgumentError shows the place of the first fault."""
    alternatives = []
    for text in texts:
        if len(text.encode()) > MAX_FILTER_BYTES:
            raise InvalidArgumentError(f"a filter is longer than {MAX_FILTER_BYTES} bytes")
        alternatives.append(_Parser(text).filter() if text else ())
    return Filter(tuple(alternatives))


def label_of(path: tuple[str, ...]) -> str | None:
    """The label that a field path names, None if it names something else."""
    return ".".join(path[1:]) if path[0] == "labels" else None


def _field(info: Info, path: tuple[str, ...]) -> str | None:
    match path[0]:
        case "name":
            return info.name
        case "parent":
            return info.parent
        case "kind":
            return info.kind.word
        case "labels":
            return info.labels.get(".".join(path[1:]))
    return None


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def filter(self) -> tuple[Selector, ...]:
        selectors = [self._selector()]
        while self._at < len(self._text):
            if self._text[self._at] != ",":
                raise self._fault("expected a comma or the end")
            self._at += 1
            selectors.append(self._selector())
        return tuple(selectors)

    def _selector(self) -> Selector:
        path = [self._path_part()]
        while self._peek() == ".":
            self._at += 1
            path.append(self._path_part())
        if self._peek() in (",", ""):
            return Selector(tuple(path))
        self._skip_space()
        start = self._at
        operator = self._take(_OPERATOR)
        if operator not in ("==", "!=", "~="):
            self._at = start
            raise self._fault("expected one of the operators ==, != and ~=")
        value = self._value(quotes='"/|' if operator == "~=" else '"')
        pattern = self._pattern(value) if operator == "~=" else None
        return Selector(tuple(path), operator, value, pattern)

    def _path_part(self) -> str:
        self._skip_space()
        if self._peek() == '"':
            return self._quoted()
        part = self._take(_FIELD)
        if not part:
            raise self._fault("expected a field name")
        return part

    def _value(self, quotes: str) -> str:
        self._skip_space()
        first = self._peek()
        if first and first in '"/|':
            if first not in quotes:
                raise self._fault("a value here can be quoted with double quotes only")
            return self._quoted()
        if first in (".", "=", "!", "~"):
            raise self._fault("a value that starts like this must be quoted")
        value = self._take(_VALUE)
        if not value:
            raise self._fault("expected a value")
        return value

    def _pattern(self, value: str) -> Any:
        if len(_bytes(value)) > MAX_PATTERN_BYTES:
            raise self._fault(f"a pattern may have {MAX_PATTERN_BYTES} bytes")
        try:
            return re2.compile(_bytes(value), _QUIET)
        except re2.error as error:
            why = error.args[0] if error.args else b""
            text = why.decode(errors="replace") if isinstance(why, bytes) else str(why)
            raise self._fault(f"not a regular expression: {text}") from None

    def _quoted(self) -> str:
        quote = self._text[self._at]
        self._at += 1
        out = bytearray()
        while (char := self._peek()) != quote:
            if char in ("", "\n"):
                raise self._fault("a quoted text does not end")
            self._at += 1
            out += self._escape(quote) if char == "\\" else char.encode()
        self._at += 1
        return out.decode("utf-8", "surrogateescape")

    def _escape(self, quote: str) -> bytes:
        char = self._peek()
        if char == quote or char in _SIMPLE_ESCAPES:
            self._at += 1
            return _SIMPLE_ESCAPES.get(char, char).encode()
        digits = self._take(_NUMERIC_ESCAPE)
        if not digits:
            raise self._fault("no such escape")
        code = int(digits, 8) if digits[0].isdigit() else int(digits[1:], 16)
        if digits[0] in "uU":
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise self._fault("not a Unicode character")
            return chr(code).encode()
        if code > 0xFF:
            raise self._fault("an octal escape names a byte")
        return bytes((code,))

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip_space(self) -> None:
        self._take(_SPACE)

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            return ""
        self._at = match.end()
        return match[0]

    def _fault(self, what: str) -> InvalidArgumentError:
        before, after = self._text[: self._at], self._text[self._at :]
        return InvalidArgumentError(f"filter [{before} >|{after[:1]}|< {after[1:]}]: {what}")
