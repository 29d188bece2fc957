"""Whatever comes in place of an artifact, an envelope or a statement: taken or refused, no fall."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from snapshotter.errors import RefusedError
from snapshotter.indexes.artifact import Content, compose_artifact, parse_artifact
from snapshotter.indexes.envelope import parse_envelope, seal
from snapshotter.indexes.keys import Keyring
from snapshotter.indexes.statement import STATEMENT_TYPE, check_statement, compose_statement
from snapshotter.indexes.trust import check_signature, sign
from tests.unit.indexes.samples import IMAGE, artifact, named
from tests.unit.indexes.scenes import KEY, RING

ROUNDS = 1500
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**63, 2**64, 10**400, 0.5, "", "x", "\0", "\ud800", "ä" * 9),
    *("sha256:", "sha256:" + "A" * 64, "sha256:" + "0" * 64, "9" * 30, "٣", "1e3", "linux/", "/"),
    *([], {}, [[]], [{}], {"": ""}, ["a"], [None], {"digest": 1}, {"a": {"b": {"c": []}}}),
]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a document with each of its keys."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def _bend(data: bytes, chance: random.Random) -> bytes:
    """The document with a few things replaced, removed or repeated; or cut, or a byte flipped."""
    if chance.random() < 0.2:
        raw = bytearray(data)
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        return bytes(raw[: chance.randrange(len(raw)) if chance.random() < 0.3 else len(raw)])
    document = json.loads(data)
    for _ in range(chance.randrange(1, 4)):
        holder, key = chance.choice(list(_places(document)))
        how = chance.random()
        try:
            if how < 0.7:
                holder[key] = copy.deepcopy(chance.choice(ODD))
            elif isinstance(holder, list):
                holder.append(copy.deepcopy(holder[key]))
            else:
                del holder[key]
        except (KeyError, IndexError):
            continue
    return json.dumps(document).encode(errors="replace")


def _outcomes(data: bytes, work: Callable[[bytes], object]) -> tuple[int, int]:
    """How many bent forms of ``data`` are taken and refused; anything else is a fall."""
    chance = random.Random(5)
    taken = refused = 0
    for _ in range(ROUNDS):
        try:
            work(_bend(data, chance))
        except RefusedError as error:
            assert str(error)
            refused += 1
        else:
            taken += 1
    return taken, refused


def test_bent_artifacts_are_taken_or_refused() -> None:
    data = compose_artifact(artifact(Content(named("envelope"), 400)))
    taken, refused = _outcomes(data, lambda bent: parse_artifact(bent, "it", image=IMAGE.digest))
    assert refused > taken


def test_bent_envelopes_prove_nothing() -> None:
    envelope = sign(artifact(), [KEY])
    whole = parse_envelope(envelope, "it")
    taken, _ = _outcomes(envelope, lambda bent: check_signature(artifact(), bent, RING, "it"))
    assert taken < ROUNDS
    assert whole.payload == compose_statement(artifact())


def test_no_bent_statement_says_what_the_whole_one_says() -> None:
    own = compose_statement(artifact())

    def check(bent: bytes) -> None:
        if bent != own:
            check_statement(bent, STATEMENT_TYPE, artifact(), "it")

    chance = random.Random(6)
    bent = [form for form in (_bend(own, chance) for _ in range(ROUNDS)) if form != own]
    for form in bent:
        with pytest.raises(RefusedError):
            check(form)
    assert len(bent) > ROUNDS / 2


def test_a_signature_of_nothing_trusted_is_none_however_it_is_bent() -> None:
    envelope = seal(STATEMENT_TYPE, compose_statement(artifact()), [KEY])
    nobody = Keyring({})
    taken, refused = _outcomes(
        envelope, lambda bent: check_signature(artifact(), bent, nobody, "it")
    )
    assert (taken, refused) == (0, ROUNDS)
