"""What a registry repeats of a request comes back without the request's secrets."""

from __future__ import annotations

import json

import pytest

from snapshotter.content import Extent
from snapshotter.errors import EmberError
from snapshotter.oci.credentials import Credential, MemoryCredentials
from snapshotter.oci.exchange import without_queries
from tests.fakes.clients import read, registry_client, registry_with
from tests.fakes.gates import Storage, TokenGate, basic
from tests.fakes.http_server import Answer, Seen
from tests.fakes.registry import FakeRegistry, error

DATA = bytes(range(256)) * 100
PASSWORD = "p:ss \u00e9 w&rd"
SIGNED = "&X-Sig=abc%2Fdef%3D%3D"


def echo(seen: Seen) -> Answer:
    words = f"{seen.headers.get('authorization')} {seen.target} {seen.body.decode()}"
    body = json.dumps({"errors": [{"code": "DENIED", "message": f"denied: {words}"}]}).encode()
    return Answer(403, [("Content-Type", "application/json")], body)


async def said_by(password: str, *, storage: bool, token: bool) -> str:
    async with registry_with(DATA) as (registry, blob), FakeRegistry() as away:
        pulls = MemoryCredentials()
        pulls.put(f"{blob.repository}:1", Credential("me", password))
        TokenGate(registry, users={"me": password})
        if storage:
            Storage(away, extra=SIGNED).serve_for(registry)
            away.inject(lambda seen, answer: echo(seen))
        elif token:
            registry.page("/token", echo)
        else:
            registry.inject(
                lambda seen, answer: echo(seen), lambda seen: "authorization" in seen.headers
            )
        async with registry_client(pulls=pulls) as client:
            with pytest.raises(EmberError) as caught:
                await read(client, blob, Extent(10, 10))
            return str(caught.value)


async def test_a_token_is_not_repeated() -> None:
    said = await said_by(PASSWORD, storage=False, token=False)
    assert "denied: " in said
    assert "token-" not in said


async def test_a_password_is_not_repeated_by_a_token_service() -> None:
    said = await said_by(PASSWORD, storage=False, token=True)
    assert "denied: " in said
    assert "scope=" in said, "what is no secret stays"
    assert basic("me", PASSWORD).removeprefix("Basic ") not in said


async def test_a_signature_is_not_repeated_by_a_storage() -> None:
    said = await said_by(PASSWORD, storage=True, token=False)
    assert "denied: " in said
    assert "abc" not in said


async def test_the_answer_to_a_refresh_token_does_not_repeat_it() -> None:
    async with registry_with(DATA) as (registry, blob):
        pulls = MemoryCredentials()
        pulls.put(f"{blob.repository}:1", Credential(identity_token="r3fr/sh+token"))
        TokenGate(registry, users={})
        registry.page("/token", echo)
        async with registry_client(pulls=pulls) as client:
            with pytest.raises(EmberError) as caught:
                await read(client, blob, Extent(10, 10))
    assert "denied: " in str(caught.value)
    assert "r3fr" not in str(caught.value)


async def test_a_short_password_does_not_take_the_message_with_it() -> None:
    async with registry_with(DATA) as (registry, blob):
        pulls = MemoryCredentials()
        pulls.put(f"{blob.repository}:1", Credential("me", "e"))
        TokenGate(registry, users={"me": "e"})
        registry.page("/token", lambda seen: error(401, "DENIED"))
        async with registry_client(pulls=pulls) as client:
            with pytest.raises(EmberError, match="DENIED denied"):
                await read(client, blob, Extent(10, 10))


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ('Get "http://h:9/a/b?X-Sig=1&y=2": refused', 'Get "http://h:9/a/b": refused'),
        ("https://me:pa%40ss@h/a: 403", "https://h/a: 403"),
        ("no link? none", "no link? none"),
        ("from http://a/?b to https://c?d", "from http://a/ to https://c"),
        ("mail me@host or http://h/@v?s=1#f", "mail me@host or http://h/@v"),
        ("http://me:p?ss@h/x", "http://h/x"),
    ],
)
def test_links_in_the_words_of_others_lose_user_and_query(said: str, shown: str) -> None:
    assert without_queries(said) == shown
