"""Names and words: modules are called by nouns of the field, and nothing is left for later."""

from __future__ import annotations

import re

from tests.tidy.sources import sources

EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "base", "stuff", "shared"}
# Written in two pieces, so that this file does not find itself.
LEFT_FOR_LATER = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
DEBUGGING = re.compile(r"\b(break" r"point\(\)|pdb\.set_tr" r"ace|print" r"k_debug)")


def test_no_module_has_a_name_that_says_nothing() -> None:
    empty = [
        source.name
        for source in sources()
        if EMPTY_NAMES & set(source.name.rsplit(".", 1)[0].split("/"))
    ]
    assert not empty


def test_nothing_is_left_for_later() -> None:
    found = [
        f"{source.name}:{number}: {line.strip()}"
        for source in sources()
        for number, line in enumerate(source.lines, 1)
        if LEFT_FOR_LATER.search(line) or DEBUGGING.search(line)
    ]
    assert not found


def test_shell_scripts_stop_at_the_first_error() -> None:
    careless = [
        source.name
        for source in sources()
        if re.match(r"#!.*\b(ba)?sh\b", source.text)
        and not re.search(r"^set -(e|eu|euo pipefail)$", source.text, re.MULTILINE)
    ]
    assert not careless
