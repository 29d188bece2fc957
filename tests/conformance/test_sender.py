"""What every Sender that meets the wire must do: over HTTP/1.1, plain and TLS, and over HTTP/2."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from snapshotter.errors import DeadlineError, UnavailableError
from snapshotter.oci.exchange import Request, Response, read_body
from snapshotter.oci.hosts import Host, TlsFiles, default_host
from snapshotter.oci.http1 import Http1Sender
from snapshotter.oci.http2 import Http2Connection
from snapshotter.oci.limits import TransportLimits
from snapshotter.oci.trust import HTTP_2, Trust
from tests.fakes.certificates import Authority
from tests.fakes.http2_wire import speak_http2
from tests.fakes.http_server import Answer, HttpServer, Seen

pytestmark = pytest.mark.timeout(20)

DATA = random.Random(5).randbytes(3_000_000)
LIMITS = TransportLimits(connect_s=2, idle_s=0.4, connections_per_host=16)


class Echo(HttpServer):
    """Answers with DATA[:length] for /length; ``change`` may make it worse."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        super().__init__(tls)
        self.change: Callable[[Answer], None] = lambda answer: None

    async def handle(self, seen: Seen) -> Answer:
        number = seen.path.rpartition("/")[2]
        body = DATA[: int(number)] if number.isdecimal() else seen.target.encode()
        headers = [("X-Same", "first"), ("X-Same", "second"), ("X-Got", str(seen.headers))]
        answer = Answer(200, headers, body)
        self.change(answer)
        return answer


@dataclass
class Subject:
    server: Echo
    host: Host
    send: Callable[[Request], Awaitable[Response]]

    def request(self, path: str, **headers: str) -> Request:
        url = f"{self.server.url}/{path}"
        return Request(url, self.host, "registry", "team/app", headers, {"X-Secret": "hush-hush"})

    async def get(self, path: str) -> bytes:
        response = await self.send(self.request(path))
        assert response.status == 200
        body = await read_body(response, len(DATA))
        assert body is not None
        return body


@asynccontextmanager
async def http1(folder: Path) -> AsyncIterator[Subject]:
    sender = Http1Sender(LIMITS)
    async with Echo(None) as server:
        yield Subject(server, default_host(server.authority, plain_http=True), sender.send)
        await sender.close()


def trusting(server: Echo, folder: Path) -> Host:
    tls = TlsFiles(ca=(folder / "authority.pem",))
    return default_host(server.authority, plain_http=False, tls=tls)


@asynccontextmanager
async def http1_over_tls(folder: Path) -> AsyncIterator[Subject]:
    sender = Http1Sender(LIMITS)
    async with Echo(Authority(folder).server_context()) as server:
        yield Subject(server, trusting(server, folder), sender.send)
        await sender.close()


@asynccontextmanager
async def http2(folder: Path) -> AsyncIterator[Subject]:
    context = Authority(folder).server_context()
    server = Echo(context)
    speak_http2(server, context)
    async with server:
        host = trusting(server, folder)
        trust = Trust((HTTP_2,))
        loop = asyncio.get_running_loop()
        connections: list[Http2Connection] = []

        async def send(request: Request) -> Response:
            if not connections or not connections[-1].is_usable:
                made = Http2Connection(LIMITS, "ember")
                await loop.create_connection(
                    lambda: made, "127.0.0.1", server.port, ssl=trust.context(host.tls)
                )
                connections.append(made)
            return await connections[-1].send(request)

        yield Subject(server, host, send)
        for connection in connections:
            connection.close()


SUBJECTS = {"http1": http1, "http1 over tls": http1_over_tls, "http2": http2}


@pytest.fixture(params=SUBJECTS)
async def subject(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Subject]:
    async with SUBJECTS[request.param](tmp_path) as made:
        yield made


@pytest.mark.parametrize("length", [0, 1, 70_000, 3_000_000])
async def test_a_body_comes_whole(subject: Subject, length: int) -> None:
    assert await subject.get(str(length)) == DATA[:length]


async def test_many_at_once_get_each_their_own(subject: Subject) -> None:
    lengths = [n * 997 for n in range(50)]
    room = asyncio.Semaphore(16)

    async def one(length: int) -> bytes:
        async with room:
            return await subject.get(str(length))

    found = await asyncio.gather(*(one(length) for length in lengths))
    assert found == [DATA[:length] for length in lengths]


async def test_what_is_asked_is_sent_as_it_is(subject: Subject) -> None:
    target = "a%2Fb/c?x=%20y&z=%2B"
    assert await subject.get(target) == f"/{target}".encode()


async def test_headers_go_out_and_come_back(subject: Subject) -> None:
    response = await subject.send(subject.request("5", Range="bytes=0-4"))
    got = response.headers["x-got"]
    for word in ("'range': 'bytes=0-4'", "'x-secret': 'hush-hush'", "'user-agent': 'ember'"):
        assert word in got
    assert "'accept-encoding': 'identity'" in got
    assert response.header_values("X-SAME") == ["first", "second"]
    assert response.headers["X-Same"] == "first"
    assert response.redacted("it said hush-hush") == "it said [hidden]"
    await response.close()


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_body_that_breaks_off_is_unavailability(subject: Subject, how: str) -> None:
    def cut(answer: Answer) -> None:
        answer.cut_after, answer.cut = 20_000, how

    subject.server.change = cut
    response = await subject.send(subject.request("100000"))
    got = 0
    with pytest.raises(UnavailableError, match="the connection broke in mid-body"):
        async for chunk in response.chunks():
            got += len(chunk)
    assert got <= 20_000
    subject.server.change = lambda answer: None
    assert await subject.get("100") == DATA[:100]


async def test_a_head_that_does_not_come_runs_into_the_deadline(subject: Subject) -> None:
    def hang(answer: Answer) -> None:
        answer.cut_after, answer.cut = -1, "hang"

    subject.server.change = hang
    with pytest.raises(DeadlineError, match="no answer in time"):
        await subject.send(subject.request("100"))
    subject.server.change = lambda answer: None
    assert await subject.get("100") == DATA[:100]


async def test_a_body_that_stops_coming_runs_into_the_deadline(subject: Subject) -> None:
    def hang(answer: Answer) -> None:
        answer.cut_after, answer.cut = 1000, "hang"

    subject.server.change = hang
    response = await subject.send(subject.request("100000"))
    with pytest.raises(DeadlineError, match="the body stopped coming"):
        await read_body(response, len(DATA))


async def test_a_body_that_only_drips_runs_into_the_deadline(subject: Subject) -> None:
    def drip(answer: Answer) -> None:
        answer.drip_bytes, answer.drip_delay_s = 1, 0.05

    subject.server.change = drip
    response = await subject.send(subject.request("1000"))
    with pytest.raises(DeadlineError, match="too slowly"):
        await read_body(response, len(DATA))


async def test_a_body_that_is_given_up_holds_up_nobody(subject: Subject) -> None:
    for _ in range(40):
        response = await subject.send(subject.request("3000000"))
        await response.close()
    assert await subject.get("3000000") == DATA


async def test_a_body_that_nobody_reads_for_a_while_holds_up_nobody(subject: Subject) -> None:
    waiting = [await subject.send(subject.request("3000000")) for _ in range(8)]
    assert await subject.get("300000") == DATA[:300_000]
    for response in waiting:
        assert await read_body(response, len(DATA)) == DATA


async def test_a_cancelled_request_leaves_the_others_alone(subject: Subject) -> None:
    def slow(answer: Answer) -> None:
        answer.head_delay_s = 0.1

    subject.server.change = slow
    tasks = [asyncio.ensure_future(subject.get("1000")) for _ in range(4)]
    await subject.server.until_asked(4)
    tasks[0].cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert found[1:] == [DATA[:1000]] * 3


async def test_a_head_with_a_status_of_failure_is_an_answer(subject: Subject) -> None:
    def refuse(answer: Answer) -> None:
        answer.status, answer.body = 404, b"no"

    subject.server.change = refuse
    response = await subject.send(subject.request("5"))
    assert response.status == 404
    assert await read_body(response, 100) == b"no"
