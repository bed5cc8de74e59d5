"""The command `events` at publishers that end, refuse it or are none, and with arguments that name none."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from kvcached.cli.main import ExitCode, main
from kvcached.events.server import CONNECTIONS_MAX
from kvcached_client.protocol.zmtp import GREETING, PUBLISHER, SUBSCRIBER, Reader, encode_message, subscribe
from tests.events.publisher import Publisher

#: Takes what is done with the connection.
Listen = Callable[[Callable[[socket.socket], None]], str]
TIMEOUT_S = 10.0
NUMBER = bytes(8)
CLEARED = {"type": "AllBlocksCleared", "namespace": "ab", "generation": 3}
DEEP = b"\x93\x00\x91\x82\xa4type\xb0AllBlocksCleared\xa1x" + b"\x91" * 100_000 + b"\xc0\xc0"


def batch(ts: float = 0.0, **fields: object) -> bytes:
    """The payload of one event."""
    return msgspec.msgpack.encode((ts, [CLEARED | fields], None))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["events", *arguments])


def told(result: Result) -> str:
    """What it says on stderr when it ends as without a daemon, and not by an exception."""
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == ExitCode.UNREACHABLE
    return result.stderr


@pytest.fixture
def listen() -> Iterator[Listen]:
    """Starts a listener that does something with its first connection and closes it; the endpoint."""
    with ExitStack() as stack:

        def start(serve: Callable[[socket.socket], None]) -> str:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            listener.settimeout(TIMEOUT_S)

            def take() -> None:
                connection, _ = listener.accept()
                connection.settimeout(TIMEOUT_S)
                with connection:
                    serve(connection)

            thread = threading.Thread(target=take)
            thread.start()
            stack.callback(thread.join)
            return f"tcp://127.0.0.1:{listener.getsockname()[1]}"

        yield start


def close_unread(connection: socket.socket) -> None:
    """Once there is something to read, return without reading it: closing the connection then resets it."""
    connection.recv(1, socket.MSG_PEEK)


def publish(*messages: list[bytes]) -> Callable[[socket.socket], None]:
    """A publisher of these messages, which stays until its subscriber has gone."""

    def serve(connection: socket.socket) -> None:
        connection.sendall(GREETING + PUBLISHER.ready + b"".join(map(encode_message, messages)))
        with suppress(ConnectionResetError):
            while connection.recv(4096):
                pass

    return serve


def test_connection_beyond_the_most_is_told_as_refused(publisher: Publisher) -> None:
    """A daemon with all connections that it takes refuses one more `kvcached events`: it says so and ends with 4."""
    with ExitStack() as stack:
        for _ in range(CONNECTIONS_MAX):
            each = stack.enter_context(socket.socket(socket.AF_UNIX))
            each.settimeout(TIMEOUT_S)
            each.connect(publisher.endpoints.events.removeprefix("ipc://"))
            each.sendall(GREETING + SUBSCRIBER.ready)
            assert each.recv(1)

        said = told(run("--endpoint", publisher.endpoints.events))

    assert "the connection was refused: there are too many connections, or the daemon has ended" in said


def test_removed_socket_is_named(publisher: Publisher) -> None:
    """Where a socket has been removed, `kvcached events` says that this may be the reason, and who tells for sure."""
    path = Path(publisher.endpoints.events.removeprefix("ipc://"))
    path.unlink()

    said = told(run("--endpoint", f"ipc://{path}"))

    assert f"ipc://{path}: No such file or directory: " in said
    assert "or the socket was removed" in said
    assert "`kvcached health` tells" in said


def test_reset_before_the_first_message_is_told_as_refused(
    listen: Listen,
) -> None:
    """A connection that is reset before the handshake ends `kvcached events` with 4 and a reason."""
    assert "the connection was refused" in told(run("--endpoint", listen(close_unread)))


def test_socket_that_cannot_be_written_is_not_taken_for_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher that is gone when `kvcached events` sends ends it with 4 and a reason: it is not click's EPIPE."""
    ours, theirs = socket.socketpair()
    theirs.close()
    monkeypatch.setattr(socket, "create_connection", lambda _: ours)

    assert "Broken pipe" in told(run("--endpoint", "tcp://127.0.0.1:1"))


def test_reset_after_a_message_is_told_as_the_end(listen: Listen) -> None:
    """A daemon that dies with its events told ends `kvcached events` with 4, after the lines of those events."""

    def serve(connection: socket.socket) -> None:
        close_unread(connection)
        connection.sendall(GREETING + PUBLISHER.ready + encode_message([b"", NUMBER, batch()]))

    result = run("--json", "--endpoint", listen(serve))

    assert "the daemon has ended" in told(result)
    assert [json.loads(line)["namespace"] for line in result.stdout.splitlines()] == ["ab"]


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([NUMBER, batch()], id="two parts"),
        pytest.param([b"", b"", NUMBER, batch()], id="four parts"),
        pytest.param([b"", b"1" * 5000, batch()], id="no number"),
        pytest.param([b"", NUMBER, b"hello"], id="no batch"),
        pytest.param([b"", NUMBER, b""], id="empty"),
        pytest.param([b"", NUMBER, batch(type="Other")], id="other event"),
        pytest.param([b"", NUMBER, batch(type="BlockRemoved", medium="GPU", block_hashes=["a"])], id="other hashes"),
        pytest.param([b"", NUMBER, batch().replace(b"\xa2ab", b"\xa2a\xff")], id="no text"),
        pytest.param([b"", NUMBER, batch(float("nan"))], id="no time"),
        pytest.param([b"", NUMBER, batch(float("inf"))], id="endless time"),
        pytest.param([b"", NUMBER, DEEP], id="deep"),
    ],
)
def test_messages_of_another_publisher_are_told_as_no_events(
    listen: Listen, parts: list[bytes], *, as_json: bool
) -> None:
    """A message that is no batch of events ends `kvcached events` with 4 and a reason, and prints nothing."""
    endpoint = listen(publish(parts))

    result = run("--endpoint", endpoint, *(["--json"] if as_json else []))

    assert f"{endpoint} publishes no events: " in told(result)
    assert result.stdout == ""


def test_names_of_a_publisher_are_escaped(listen: Listen) -> None:
    """What a publisher calls a namespace or a medium neither forges a line nor speaks to a terminal."""
    hostile = "\x1b[2J\n"
    message = [b"", NUMBER, batch(type="BlockRemoved", medium=hostile, namespace=hostile, block_hashes=[bytes(16)])]

    def serve(connection: socket.socket) -> None:
        close_unread(connection)
        connection.sendall(GREETING + PUBLISHER.ready + encode_message(message))

    result = run("--endpoint", listen(serve))

    told(result)
    assert (len(result.stdout.splitlines()), "\x1b" in result.stdout, "\\x1b[2J" in result.stdout) == (1, False, True)


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:99999",
        "tcp://127.0.0.1:abc",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1",
        "tcp://[::1",
        "tcp://a..b:1",
        f"tcp://{'a' * 64}:1",
        "tcp://\udcff:1",
        "http://127.0.0.1:1",
        "127.0.0.1:1",
    ],
)
def test_endpoint_that_is_none_is_wrong_usage(endpoint: str) -> None:
    """Whatever is no endpoint ends `kvcached events` with 2 and says what one looks like."""
    result = run("--endpoint", endpoint)

    assert result.exit_code == ExitCode.USAGE
    assert "give ipc:///PATH or tcp://HOST:PORT" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("endpoint", "code", "says"),
    [("tcp://127.0.0.1:1", ExitCode.UNREACHABLE, "Connection refused"), ("foo", ExitCode.USAGE, "give ipc:///PATH")],
)
def test_endpoint_needs_no_package_of_an_extra(endpoint: str, code: ExitCode, says: str) -> None:
    """Events are neither encrypted nor authenticated: `kvcached events --endpoint` does without PyNaCl."""
    without = "import sys; sys.modules['nacl'] = None; from kvcached.cli.main import main; main()"

    call = [sys.executable, "-c", without, "events", "--endpoint", endpoint]
    done = subprocess.run(call, capture_output=True, text=True, check=False, timeout=TIMEOUT_S * 3)

    assert (done.returncode, says in done.stderr) == (code, True), done.stderr


def test_run_directory_that_no_socket_fits_is_wrong_usage() -> None:
    """A run directory whose sockets would have too long a path ends `kvcached events` with 2 and says so."""
    result = run("--run-dir", "/" + "x" * 200)

    assert (result.exit_code, "at most 107 are possible" in result.stderr) == (ExitCode.USAGE, True)


@pytest.mark.parametrize(
    ("topic", "says"),
    [("\udcff", "no text in UTF-8"), ("x" * 1015, "has 1015 bytes"), ("ä" * 508, "has 1016 bytes")],
)
def test_topic_that_no_daemon_takes_is_wrong_usage(publisher: Publisher, topic: str, says: str) -> None:
    """A topic that is no text, or longer than a daemon takes, ends `kvcached events` with 2 and says why."""
    result = run("--topic", topic, "--endpoint", publisher.endpoints.events)

    assert result.exit_code == ExitCode.USAGE
    assert says in " ".join(result.stderr.split())


def test_longest_topic_is_the_longest_that_a_daemon_takes(listen: Listen) -> None:
    """A daemon takes a subscription to the longest topic of `kvcached events`, and cuts off one of a byte more."""
    reader = Reader(PUBLISHER)

    def serve(connection: socket.socket) -> None:
        while not reader.subscriptions and reader.violation is None:
            reader.read(connection.recv(4096), 1)

    told(run("--topic", "x" * 1014, "--endpoint", listen(serve)))

    assert [each.topic for each in reader.subscriptions] == [b"x" * 1014]
    reader.read(subscribe(b"x" * 1015), 1)
    assert reader.violation is not None
