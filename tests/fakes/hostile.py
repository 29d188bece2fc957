"""Manners of registries that make a client's life hard, to be put on a FakeRegistry while it runs.

Each is what some registry, cache or firewall does. Some lie, some are only slow or stingy; of all
of them a client that tries again gets right bytes. `FakeRegistry.heal` takes them
away, but for a gate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count

from tests.fakes.gates import TokenGate
from tests.fakes.http_server import Answer, Seen
from tests.fakes.registry import FakeRegistry, When, error, is_blob, is_range

Manner = Callable[[FakeRegistry], None]

_TICK_S = 0.02


def each(nth: int, when: When) -> When:
    """Every ``nth`` request for which ``when`` holds, whoever asks."""
    numbers = count(1)
    return lambda seen: when(seen) and next(numbers) % nth == 0


def throttles(bytes_per_s: int) -> Manner:
    """So many bytes a second on each connection, however many there are."""

    def change(seen: Seen, answer: Answer) -> Answer:
        answer.drip_bytes, answer.drip_delay_s = max(1, int(bytes_per_s * _TICK_S)), _TICK_S
        return answer

    return lambda registry: registry.inject(change, is_blob)


def caps_requests(most: int, *, announced: bool = False) -> Manner:
    """Ends each connection after ``most`` requests, ``announced`` by `Connection: close` or not."""

    def change(seen: Seen, answer: Answer) -> Answer:
        answer.last = seen.turn >= most
        if answer.last and announced:
            answer.set("Connection", "close")
        return answer

    return lambda registry: registry.inject(change)


def caps_ranges(most: int) -> Manner:
    """Answers ``most`` ranges on each connection, and the rest of them with a reset."""

    def change(seen: Seen, answer: Answer) -> Answer:
        answer.cut_after, answer.cut = -1, "reset"
        return answer

    return lambda registry: registry.inject(change, lambda s: is_range(s) and s.turn > most)


def resets_connections(nth: int) -> Manner:
    """Resets every ``nth`` connection as soon as it is there."""

    def put_on(registry: FakeRegistry) -> None:
        registry.refuses = lambda connection: connection % nth == 0

    return put_on


def resets_bodies(nth: int, after: int = 1000) -> Manner:
    """Resets the connection in the middle of every ``nth`` body."""
    return _cuts(nth, after, "reset")


def truncates(nth: int, after: int = 1000) -> Manner:
    """Ends every ``nth`` body early, and the connection with it, as if that were all."""
    return _cuts(nth, after, "close")


def hangs(nth: int, after: int = 0) -> Manner:
    """Sends nothing more of every ``nth`` body, for ever; -1: not even the head."""
    return _cuts(nth, after, "hang")


def _cuts(nth: int, after: int, how: str) -> Manner:
    def change(seen: Seen, answer: Answer) -> Answer:
        answer.cut_after, answer.cut = after, how
        return answer

    return lambda registry: registry.inject(change, each(nth, is_blob))


def slow_to_begin(delay_s: float) -> Manner:
    """Thinks for so long before each answer about a blob."""

    def change(seen: Seen, answer: Answer) -> Answer:
        answer.head_delay_s = delay_s
        return answer

    return lambda registry: registry.inject(change, is_blob)


def lies_about_ranges(nth: int) -> Manner:
    """Sends another range than was asked for with every ``nth``, under its true name."""

    def change(seen: Seen, answer: Answer) -> Answer:
        length = len(answer.body)
        answer.set("Content-Range", f"bytes 1-{length}/{length + 1}")
        return answer

    return lambda registry: registry.inject(change, each(nth, is_range))


def sends_other_bytes(nth: int) -> Manner:
    """Sends other bytes of the right length with every ``nth`` range: only a digest can tell."""

    def change(seen: Seen, answer: Answer) -> Answer:
        answer.body = answer.body[1:] + answer.body[:1]
        return answer

    return lambda registry: registry.inject(change, each(nth, is_range))


def ignores_ranges(nth: int = 1) -> Manner:
    """Answers every ``nth`` range with 200 and the whole blob."""

    def put_on(registry: FakeRegistry) -> None:
        def change(seen: Seen, answer: Answer) -> Answer:
            repository, _, name = seen.path.removeprefix("/v2/").partition("/blobs/")
            return Answer(200, [], registry.repositories[repository].blobs[name])

        registry.inject(change, each(nth, is_range))

    return put_on


def forgets_logins(uses: int) -> Manner:
    """Wants a token, which anybody may have, and forgets each after so many requests for blobs."""

    def put_on(registry: FakeRegistry) -> None:
        gate = TokenGate(registry)
        used: Counter[str] = Counter()

        def change(seen: Seen, answer: Answer) -> Answer:
            token = seen.headers.get("authorization", "").removeprefix("Bearer ")
            used[token] += 1
            if used[token] >= uses:
                gate.good.discard(token)
            return answer

        registry.inject(change, is_blob)

    return put_on


def wants_quiet(nth: int, retry_after: str | None = "1") -> Manner:
    """Answers every ``nth`` request for a blob with 429, and says when to come back."""
    headers = [] if retry_after is None else [("Retry-After", retry_after)]

    def change(seen: Seen, answer: Answer) -> Answer:
        return error(429, "TOOMANYREQUESTS", headers)

    return lambda registry: registry.inject(change, each(nth, is_blob))


def manners(nth: int = 10) -> dict[str, Manner]:
    """One of each by name, in a measure that a client bears which tries again; what does not
    happen always happens every ``nth`` time."""
    return {
        "throttles each connection": throttles(2_000_000),
        "ends each connection after three requests": caps_requests(3),
        "ends each connection after three requests and says so": caps_requests(3, announced=True),
        "resets each connection after three ranges": caps_ranges(3),
        "resets some connections": resets_connections(nth),
        "resets some bodies": resets_bodies(nth),
        "truncates some bodies": truncates(nth),
        "hangs in some bodies": hangs(nth, 1000),
        "hangs before some heads": hangs(nth, -1),
        "is slow to begin": slow_to_begin(0.15),
        "lies about some ranges": lies_about_ranges(nth),
        "ignores some ranges": ignores_ranges(nth),
        "ignores ranges": ignores_ranges(),
        "forgets logins": forgets_logins(2 * nth),
        "wants quiet now and then": wants_quiet(nth),
    }
