"""The HTTP server: answers, refusals, and peers that are slow, silent, rude or many."""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from pathlib import Path

import pytest
import uvloop

from kvcached.process.access import Access, Role
from kvcached.server import connections, http
from kvcached.server.http import CONNECTIONS_MAX, LINGERING_MAX, REQUEST_BYTES_MAX, HttpServer, Page
from tests.access.grants import access_of

GET = b"GET /page HTTP/1.1\r\nHost: here\r\n\r\n"
PATIENCE_S = 20


class FakePages:
    """One page of text, one that is large, one that comes when the test says so, and one that fails."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.is_full = asyncio.Event()
        self.released = asyncio.Event()

    async def get(self, path: str, accept: str) -> Page:
        self.asked.append((path, accept))
        if len(self.asked) == CONNECTIONS_MAX:
            self.is_full.set()
        match path:
            case "/late":
                await self.released.wait()
            case "/large":
                return Page(HTTPStatus.OK, b"x" * (8 << 20))
            case "/policy":
                return Page(HTTPStatus.OK, b"", headers=(("content-security-policy", "default-src 'none'"),))
            case "/broken":
                raise ValueError("a bug")
        return Page(HTTPStatus.OK, b"hello\n")


@asynccontextmanager
async def serving(place: str | tuple[str, int], access: Access | None = None) -> AsyncIterator[FakePages]:
    pages = FakePages()
    server = HttpServer(place, pages, access or Access())
    server.start()
    try:
        yield pages
    finally:
        server.close()


def run(main: Coroutine[None, None, None]) -> None:
    """Run a test in the daemon's kind of loop."""

    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await main

    uvloop.run(bounded())


async def ask(path: str, data: bytes) -> bytes:
    """What the server says to these bytes, until it closes its end."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(data)
        return await reader.read()
    finally:
        writer.close()


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "http.sock")


def test_get_is_answered_and_the_connection_closed(path: str) -> None:
    """A GET gets its page with its length; what `Accept` says reaches the page, and the query does not."""

    async def main() -> None:
        async with serving(path) as pages:
            answer = await ask(path, b"GET /page?x=1 HTTP/1.1\r\nHost: here\r\nAccept: a\r\naccept: b\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert answer.endswith(b"\r\n\r\nhello\n")
            assert b"content-length: 6\r\nconnection: close\r\n" in answer
            assert pages.asked == [("/page", "a,b")]

    run(main())


def test_head_has_no_body(path: str) -> None:
    """HEAD gets the headers of the GET alone."""

    async def main() -> None:
        async with serving(path):
            answer = await ask(path, GET.replace(b"GET", b"HEAD"))
            assert b"content-length: 6\r\n" in answer
            assert answer.endswith(b"\r\n\r\n")

    run(main())


@pytest.mark.parametrize(
    ("data", "status"),
    [
        pytest.param(b"HEAD / HTTP/1.1\r\n\r\n", HTTPStatus.BAD_REQUEST, id="no host"),
        pytest.param(b"HEAD / HTTP/1.1\r\nhost: here\r\nx\r\n\r\n", HTTPStatus.BAD_REQUEST, id="no header"),
        pytest.param(
            b"HEAD / HTTP/1.1\r\nx: " + bytes(16 * 1024), HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, id="too long"
        ),
    ],
)
def test_head_that_is_refused_has_no_body(data: bytes, status: HTTPStatus, path: str) -> None:
    """An answer to HEAD ends behind its headers, also where the request is refused before it is understood."""

    async def main() -> None:
        async with serving(path):
            answer = await ask(path, data)
            assert status_of(answer) == status
            assert b"content-length: " in answer
            assert answer.endswith(b"\r\n\r\n")

    run(main())


def test_tcp_is_served_on_both_families() -> None:
    """A loopback address of either family is served."""

    async def main() -> None:
        for host, family in (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)):
            with closing(socket.socket(family)) as free:
                try:
                    free.bind((host, 0))
                except OSError:
                    continue  # a machine without this family
                port = free.getsockname()[1]
            async with serving((host, port)):
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(GET.replace(b"here", f"[{host}]:{port}".encode() if ":" in host else host.encode()))
                assert status_of(await reader.read()) == HTTPStatus.OK
                writer.close()

    run(main())


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", HTTPStatus.OK),
        ("[::1]:9410", HTTPStatus.OK),
        ("localhost:8080", HTTPStatus.OK),
        ("monitor.LOCALHOST", HTTPStatus.OK),
        ("rebound.example:9410", HTTPStatus.MISDIRECTED_REQUEST),
        ("localhost.example", HTTPStatus.MISDIRECTED_REQUEST),
        ("127.0.0.1.example", HTTPStatus.MISDIRECTED_REQUEST),
        ("", HTTPStatus.MISDIRECTED_REQUEST),
    ],
)
def test_port_is_served_under_its_own_names_alone(host: str, status: HTTPStatus) -> None:
    """A page of the internet whose name has been made to point here is refused, so that its scripts read nothing."""

    async def main() -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            port = free.getsockname()[1]
        async with serving(("127.0.0.1", port)) as pages:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET.replace(b"here", host.encode()))
            assert status_of(await reader.read()) == status
            assert len(pages.asked) == (status == HTTPStatus.OK)
            writer.close()

    run(main())


def test_page_comes_with_its_headers(path: str) -> None:
    """A page's own headers are sent, and each answer says that its type is not to be guessed."""

    async def main() -> None:
        async with serving(path):
            answer = await ask(path, GET.replace(b"/page", b"/policy"))
            assert b"\r\ncontent-security-policy: default-src 'none'\r\n" in answer
            for target in (b"/page", b"/broken"):
                assert b"\r\nx-content-type-options: nosniff\r\n" in await ask(path, GET.replace(b"/page", target))

    run(main())


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (GET.replace(b"GET", b"POST"), 405),
        (b"DELETE /page HTTP/1.1\r\nHost: x\r\nContent-Length: 999999\r\n\r\n" + b"y" * 999_999, 405),
        (b"OPTIONS * HTTP/1.1\r\nHost: here\r\n\r\n", 405),
        (GET.replace(b"Host: here\r\n", b""), 400),
        (GET.replace(b"HTTP/1.1", b"HTCPCP/1.0"), 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /page HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n", 400),
        (b"GET /page HTTP/1.1\r\nX: " + b"a" * 100_000, 431),
        (b"GET /" + b"a" * 2 * REQUEST_BYTES_MAX, 431),
        (b"GET /page HTTP/1.1\r\n" + b"X: y\r\n" * 10_000, 431),
    ],
)
def test_bad_request_gets_a_clear_answer(data: bytes, status: int, path: str) -> None:
    """A wrong method, garbage and endless headers get the status for it and a line that says what is wrong."""

    async def main() -> None:
        async with serving(path) as pages:
            answer = await ask(path, data)
            assert status_of(answer) == status
            assert answer.rpartition(b"\r\n\r\n")[2].endswith(b"\n")
            assert (b"allow: GET, HEAD" in answer) == (status == HTTPStatus.METHOD_NOT_ALLOWED)
            assert not pages.asked
            assert status_of(await ask(path, GET)) == HTTPStatus.OK

    run(main())


def test_request_that_does_not_end_is_dropped(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that says nothing, or sends its header byte by byte, is cut off in time."""
    monkeypatch.setattr(connections, "HALF_OPEN_S_MAX", 0.2)

    async def main() -> None:
        async with serving(path):
            silent, silent_writer = await asyncio.open_unix_connection(path)
            slow, slow_writer = await asyncio.open_unix_connection(path)
            slow_writer.write(GET[:10])
            assert await silent.read() == await slow.read() == b""
            assert status_of(await ask(path, GET)) == HTTPStatus.OK
            silent_writer.close()
            slow_writer.close()

    run(main())


def test_slow_reader_is_dropped(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that does not read its answer is cut off in time, and others are served meanwhile."""
    monkeypatch.setattr(http, "ANSWER_S_MAX", 0.3)

    async def main() -> None:
        async with serving(path):
            with closing(socket.socket(socket.AF_UNIX)) as stuck:
                stuck.connect(path)
                stuck.send(GET.replace(b"page", b"large"))
                assert status_of(await ask(path, GET)) == HTTPStatus.OK
                await asyncio.get_running_loop().run_in_executor(None, wait_for_end, stuck)

    run(main())


def wait_for_end(stuck: socket.socket) -> None:
    """Until the peer has closed a connection whose answer was not read: less than the answer is there."""
    poll = select.poll()
    poll.register(stuck, 0)  # the hang-up alone
    assert poll.poll(PATIENCE_S * 1000)
    received = 0
    while data := stuck.recv(1 << 20):
        received += len(data)
    assert received < 8 << 20


@pytest.mark.full
def test_hundreds_of_connections_lose_their_own_places(path: str) -> None:
    """Connections that say nothing are dropped, the oldest first, for one that asks."""

    def flood() -> tuple[int, int]:
        before = descriptors()
        idle = [socket.socket(socket.AF_UNIX) for _ in range(100)]
        for connection in idle:
            connection.connect(path)  # waits while the backlog is full
        with closing(socket.socket(socket.AF_UNIX)) as asking:
            asking.connect(path)
            asking.send(GET)
            answer = asking.recv(4096)
        held = descriptors() - before - len(idle)
        for connection in idle:
            connection.close()
        return status_of(answer), held

    async def main() -> None:
        async with serving(path):
            status, held = await asyncio.get_running_loop().run_in_executor(None, flood)
            assert status == HTTPStatus.OK
            assert held <= 2 * CONNECTIONS_MAX

    run(main())


def test_too_many_requests_at_once_are_told_so(path: str) -> None:
    """Beyond the limit of requests that wait for their page, one is answered with 503; the others get their pages."""

    async def main() -> None:
        async with serving(path) as pages:
            late = [asyncio.create_task(ask(path, GET.replace(b"page", b"late"))) for _ in range(CONNECTIONS_MAX)]
            await pages.is_full.wait()
            refused = await ask(path, GET)
            assert status_of(refused) == HTTPStatus.SERVICE_UNAVAILABLE
            assert b"16 connections" in refused
            pages.released.set()
            assert {status_of(answer) for answer in await asyncio.gather(*late)} == {HTTPStatus.OK}

    run(main())


def test_peers_that_have_their_answer_take_no_place(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever keeps connections open after the answer keeps nobody out; of too many of them the oldest are closed."""
    monkeypatch.setattr(http, "_LINGER_S_MAX", 10 * PATIENCE_S)

    def flood() -> tuple[set[int], list[int]]:
        kept, statuses = [socket.socket(socket.AF_UNIX) for _ in range(CONNECTIONS_MAX + LINGERING_MAX)], set()
        for connection in kept:
            connection.connect(path)
            connection.send(GET)
            statuses.add(status_of(connection.recv(4096)))
        ended = []
        for connection in kept[:CONNECTIONS_MAX]:
            poll = select.poll()
            poll.register(connection, 0)  # the hang-up alone
            ended.extend(poll.poll(PATIENCE_S * 1000))
        for connection in kept:
            connection.close()
        return statuses, [events for _, events in ended]

    async def main() -> None:
        async with serving(path):
            statuses, ended = await asyncio.get_running_loop().run_in_executor(None, flood)
            assert statuses == {HTTPStatus.OK}
            assert ended == [select.POLLHUP] * CONNECTIONS_MAX

    run(main())


def test_closed_server_ends_connections_that_have_their_answer(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that closes does not wait for peers that keep their ends open."""
    monkeypatch.setattr(http, "_LINGER_S_MAX", 10 * PATIENCE_S)

    async def main() -> None:
        in_thread, kept = partial(asyncio.get_running_loop().run_in_executor, None), socket.socket(socket.AF_UNIX)
        async with serving(path):
            kept.connect(path)
            kept.send(GET)
            assert status_of(await in_thread(kept.recv, 4096)) == HTTPStatus.OK
            assert await in_thread(kept.recv, 4096) == b""  # the answer's end
        poll = select.poll()
        poll.register(kept, 0)  # the hang-up alone
        assert await in_thread(poll.poll, PATIENCE_S * 500)
        kept.close()

    run(main())


def test_bug_in_a_page_is_told_and_logged(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """A page that fails is answered with 500 and logged with its traceback; the server goes on."""

    async def main() -> None:
        async with serving(path):
            assert status_of(await ask(path, GET.replace(b"page", b"broken"))) == HTTPStatus.INTERNAL_SERVER_ERROR
            assert status_of(await ask(path, GET)) == HTTPStatus.OK

    run(main())
    (record,) = caplog.records
    assert record.exc_info is not None
    assert "a bug" in str(record.exc_info[1])


def test_no_descriptor_is_left(path: str) -> None:
    """When the server is closed, none of its descriptors is open, whatever its connections were doing."""
    before = descriptors()

    async def main() -> None:
        async with serving(path):
            for data in (GET, GET[:10], b"", GET.replace(b"page", b"large")):
                connection = socket.socket(socket.AF_UNIX)
                connection.connect(path)
                connection.send(data)
                await ask(path, GET)
                connection.close()
                kept = socket.socket(socket.AF_UNIX)
                kept.connect(path)
                kept.close()

    run(main())
    assert not Path(path).exists()
    assert descriptors() == before


def test_living_process_keeps_its_socket(path: str) -> None:
    """A path where another process listens is not taken from it; one that a dead process has left is."""

    async def main() -> None:
        async with serving(path):
            with pytest.raises(OSError, match="another process serves"):
                HttpServer(path, FakePages(), Access()).start()
        left = socket.socket(socket.AF_UNIX)
        left.bind(path)
        left.close()
        async with serving(path):
            assert status_of(await ask(path, GET)) == HTTPStatus.OK

    run(main())


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(("role", "status"), [(Role.LOOK, b"200"), (Role.OPERATE, b"200"), (Role.ENGINE, b"403")])
def test_unix_socket_serves_whoever_may_look(tmp_path: Path, role: Role, status: bytes) -> None:
    """At a unix socket the kernel says who asks: other users need a role that lets them look."""
    access = replace(access_of(role, user=str(os.geteuid())), own_uid=os.geteuid() + 1)

    async def main() -> None:
        path = str(tmp_path / "http.sock")
        async with serving(path, access) as pages:
            assert (await ask(path, GET)).split()[1] == status
            assert bool(pages.asked) == (status == b"200")

    run(main())
