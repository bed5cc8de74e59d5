"""The client's end of the RPC socket: whole messages, whatever the kernel takes and gives at a time."""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import zmq

from kvcached_client import AsyncClient, Client, DaemonSilent, DaemonUnreachable, FailureReason, KeyChain
from kvcached_client.protocol.engine import (
    Acquire,
    Acquired,
    Load,
    LoadTicket,
    Match,
    Matched,
    Release,
    Request,
    decode_request,
    encode,
)
from kvcached_client.protocol.zmtp import DEALER, GREETING, ROUTER, Message, Reader, encode_message
from kvcached_client.transport import connection, misses
from kvcached_client.transport.connection import Connection
from kvcached_client.types import pack_ranges
from tests.client.fake_daemon import BLOCK_SIZE, SILENCE, FakeDaemon
from tests.client.test_aio import Answer, arrival, held_reply, is_readable, run

Connect = Callable[..., Client]

_PATIENCE_MS = 20_000
_MESSAGES_MAX = 100
#: Tokens of a prompt whose keys a small socket does not take at once.
_LONG = BLOCK_SIZE * 10_000


class Ends(NamedTuple):
    """A connection, and the daemon's end of it."""

    client: Connection
    daemon: socket.socket

    def shake_hands(self) -> None:
        """Let the client know that it was accepted."""
        self.daemon.sendall(GREETING + ROUTER.ready)
        assert self.receive() == []
        assert self.client.is_ready

    def receive(self) -> list[Message]:
        """What the client receives once something has arrived."""
        poller = select.poll()
        poller.register(self.client.fileno(), self.client.events)
        assert poller.poll(_PATIENCE_MS)
        messages: list[Message] = []
        self.client.receive(messages.append)
        return messages


@contextmanager
def _ends(path: str) -> Iterator[Ends]:
    """Both ends, before the handshake."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        client = Connection(path, deadline_ms=_PATIENCE_MS)
        accepted, _ = listener.accept()
        with closing(client), accepted:
            yield Ends(client, accepted)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    """Both ends, before the handshake."""
    with _ends(str(tmp_path / "rpc.sock")) as both:
        yield both


def _read_all(daemon: socket.socket, reader: Reader, count: int) -> list[list[bytes]]:
    """So many messages of a client."""
    messages: list[list[bytes]] = []
    while len(messages) < count:
        messages += [each.parts for each in reader.read(daemon.recv(1 << 20), _MESSAGES_MAX)]
        while reader.has_more:
            messages += [each.parts for each in reader.read(b"", _MESSAGES_MAX)]
    return messages


def test_message_that_the_socket_does_not_take_at_once_arrives_whole(ends: Ends) -> None:
    """The rest of a large message is kept; no other message is taken before it has left."""
    ends.shake_hands()
    large, reader = [b"header", bytes(3 << 20)], Reader()
    assert ends.client.send(large)
    assert ends.client.events & select.POLLOUT
    assert not ends.client.send([b"next"])

    ends.daemon.settimeout(_PATIENCE_MS / 1000)
    came: list[list[bytes]] = []
    while not came:
        came += [each.parts for each in reader.read(ends.daemon.recv(1 << 20), _MESSAGES_MAX)]
        ends.client.flush()
    assert came == [large]
    assert ends.client.events == select.POLLIN
    assert ends.client.send([b"next"])
    assert _read_all(ends.daemon, reader, 1) == [[b"next"]]


def _interrupted(call: Callable[[], object], instruction: int) -> bool:
    """Make a call, and interrupt it before so many instructions of the connection's code; False if there are fewer."""
    left = itertools.count(-instruction)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes = frame.f_code.co_filename == connection.__file__
        if event == "opcode" and not next(left):
            raise KeyboardInterrupt
        return trace

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(earlier)
    return False


@pytest.mark.parametrize(("size", "is_flushed"), [(8, False), (3 << 20, False), (3 << 20, True)])
def test_interrupted_message_is_not_continued_by_the_next(tmp_path: Path, size: int, is_flushed: bool) -> None:
    """Wherever an exception of a signal handler ends the sending of a message, it arrives whole or not at all."""
    first, then = [b"header", bytes(size)], [b"next"]
    is_interrupted, instruction = True, 0
    while is_interrupted:
        instruction += 1
        with _ends(str(tmp_path / str(instruction))) as ends:
            ends.shake_hands()
            ends.daemon.settimeout(_PATIENCE_MS / 1000)
            came: list[list[bytes]] = []
            reader = Reader()
            if is_flushed:
                assert ends.client.send(first)
                read = ends.daemon.recv(1 << 20)
                is_interrupted = _interrupted(ends.client.flush, instruction)
                came += [each.parts for each in reader.read(read, _MESSAGES_MAX)]
            else:
                is_interrupted = _interrupted(partial(ends.client.send, first), instruction)
            while not ends.client.send(then):
                came += [each.parts for each in reader.read(ends.daemon.recv(1 << 20), _MESSAGES_MAX)]
            while then not in came:
                came += _read_all(ends.daemon, reader, 1)
            assert came in ([first, then], [] if is_flushed else [then])
    assert instruction > 20


@pytest.mark.parametrize("is_read", [True, False], ids=["", "reading interrupted before"])
def test_goodbye_does_not_continue_an_interrupted_message(tmp_path: Path, is_read: bool) -> None:
    """The last message comes whole behind one whose sending was interrupted, also where nothing is read any more."""
    first, bye = [b"header", bytes(3 << 20)], [b"bye"]
    is_interrupted, instruction = True, 0
    while is_interrupted:
        instruction += 1
        with _ends(str(tmp_path / str(instruction))) as ends:
            ends.shake_hands()
            ends.daemon.settimeout(_PATIENCE_MS / 1000)
            is_interrupted = _interrupted(partial(ends.client.send, first), instruction)
            ends.client._is_reading = not is_read
            ends.client.send_last(bye)
            came, reader = list[list[bytes]](), Reader()
            while bye not in came:
                came += [each.parts for each in reader.read(ends.daemon.recv(1 << 20), _MESSAGES_MAX)]
                while reader.has_more:
                    came += [each.parts for each in reader.read(b"", _MESSAGES_MAX)]
                ends.client.flush()
            assert came in ([first, bye], [bye])
            assert is_read or not ends.client.events & select.POLLIN
    assert instruction > 20


def test_interrupted_reading_is_the_end_unless_nothing_is_lost(tmp_path: Path) -> None:
    """Wherever an exception of a signal handler ends the reading, all replies are there, or the connection is over."""
    replies = [[b"one", bytes(300)], [b"two"]]
    is_interrupted, instruction, outcomes = True, 0, set()
    while is_interrupted:
        instruction += 1
        with _ends(str(tmp_path / str(instruction))) as ends:
            ends.shake_hands()
            ends.daemon.sendall(b"".join(map(encode_message, replies)))
            came: list[Message] = []
            is_interrupted = _interrupted(partial(ends.client.receive, came.append), instruction)
            if not ends.client.is_over:
                ends.client.receive(came.append)
                assert [message.parts for message in came] == replies
            else:
                assert not ends.client.send([b"next"])
                assert isinstance(ends.client.refusal, DaemonUnreachable)
            outcomes.add(ends.client.is_over)
    assert outcomes == {False, True}
    assert instruction > 20


def test_nothing_is_sent_before_the_daemon_has_accepted(ends: Ends) -> None:
    """A request waits for the daemon's part of the handshake."""
    assert not ends.client.send([b"early"])
    ends.shake_hands()
    assert ends.client.send([b"now"])


def test_messages_that_arrive_together_come_out_one_by_one(ends: Ends) -> None:
    """Hundreds of replies, more than one receive takes, are received at one look, in their order."""
    ends.shake_hands()
    replies = [[b"%d" % number, bytes(500)] for number in range(300)]
    ends.daemon.sendall(b"".join(map(encode_message, replies)))

    assert [message.parts for message in ends.receive()] == replies


def test_replies_from_before_the_end_are_not_lost(ends: Ends) -> None:
    """What the daemon has sent before it closes is received, and then that it has closed."""
    ends.shake_hands()
    ends.daemon.sendall(encode_message([b"last"]))
    ends.daemon.close()

    assert [message.parts for message in ends.receive()] == [[b"last"]]
    assert ends.receive() == []
    assert ends.client.is_over
    assert not ends.client.send([b"too late"])


def test_sending_to_a_daemon_that_is_gone_is_the_end(ends: Ends) -> None:
    """A message for nobody is not taken."""
    ends.shake_hands()
    ends.daemon.close()
    assert not ends.client.send([b"too late"])
    assert ends.client.is_over


@pytest.mark.parametrize("data", [b"HTTP/1.1 400 Bad Request\r\n", GREETING + b"\x04\x06\x05HELLO"])
def test_other_protocols_are_the_end(ends: Ends, data: bytes) -> None:
    """Whoever listens and is no daemon is not listened to."""
    ends.daemon.sendall(data)
    assert ends.receive() == []
    assert ends.client.is_over


def test_nobody_listens(tmp_path: Path) -> None:
    """Without a listener there is no connection."""
    with pytest.raises(DaemonUnreachable, match="no socket"):
        Connection(str(tmp_path / "rpc.sock"), deadline_ms=_PATIENCE_MS)


def test_full_listener_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    """A listener that accepts nobody is unreachable after the deadline, and says who listens."""
    path = str(tmp_path / "rpc.sock")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(path)
        listener.listen(0)
        first.connect(path)
        with pytest.raises(DaemonUnreachable, match="accepted no request for 50 ms"):
            Connection(path, deadline_ms=50)


def test_router_of_libzmq_is_understood(tmp_path: Path) -> None:
    """Client and libzmq's ROUTER speak the same protocol: the handshake, messages of both lengths, both ways."""
    path = str(tmp_path / "rpc.sock")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"ipc://{path}")
        with closing(Connection(path, deadline_ms=_PATIENCE_MS)) as client:
            poller = select.poll()
            poller.register(client.fileno(), select.POLLIN)
            messages: list[Message] = []
            while not client.is_ready:
                assert poller.poll(_PATIENCE_MS)
                client.receive(messages.append)
                assert messages == []
            assert client.send([b"header", bytes(1000)])
            assert router.poll(_PATIENCE_MS)
            peer, *parts = router.recv_multipart()
            assert parts == [b"header", bytes(1000)]
            router.send_multipart([peer, b"reply", bytes(100_000)])
            while not messages:
                assert poller.poll(_PATIENCE_MS)
                client.receive(messages.append)
            assert messages[0].parts == [b"reply", bytes(100_000)]


def test_message_that_the_socket_does_not_take_at_once(daemon: FakeDaemon) -> None:
    """The end of a long message is sent when the daemon reads; calls behind it wait for that, no longer."""

    async def work(client: AsyncClient) -> tuple[bool, int]:
        long = client.acquire("long", client.chain(range(6 * _LONG)))
        lease, hit = await asyncio.gather(long, client.match(client.chain(range(8))))
        return lease.granted, hit

    assert run(daemon, work) == (True, 2)


class Unread(NamedTuple):
    """The daemon's end of a client's connection, which only the test reads."""

    end: socket.socket
    reader: Reader

    @classmethod
    @contextmanager
    def of(cls, client: Client | AsyncClient) -> Iterator[Unread]:
        """In the place of the daemon's own, behind a socket that takes little; before the client's first call."""
        own, end = socket.socketpair()
        with own, end:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            own.setblocking(False)
            end.settimeout(_PATIENCE_MS / 1000)
            os.dup2(own.fileno(), client._channel.descriptors()[0], inheritable=False)
            reader = Reader()
            reader.read(GREETING + DEALER.ready, _MESSAGES_MAX)
            yield cls(end, reader)

    def read(self, count: int) -> list[list[bytes]]:
        """So many messages, once they are there."""
        return _read_all(self.end, self.reader, count)

    def reply(self, messages: list[list[bytes]]) -> None:
        """Tell each match of these messages its place among them as its hit."""
        for place, (header, *_) in enumerate(messages):
            self.end.sendall(encode_message([encode(Matched(id=decode_request(header).id, device=place))]))


@pytest.mark.parametrize(
    ("failures", "ends", "last"),
    [("raise", ["DeadlineExceeded"] * 10, "NoneType"), ("miss", ["int"] * 10, "CircuitOpen")],
)
def test_loop_goes_on_while_the_daemon_reads_nothing(
    daemon: FakeDaemon, failures: str, ends: list[str], last: str
) -> None:
    """Tasks whose prompts the socket does not take wait side by side, until the deadline that all of them have."""

    async def work(client: AsyncClient) -> tuple[list[str], str]:
        client._channel.deadline_ms = 200
        with Unread.of(client):
            chain = client.chain(range(_LONG))
            results = await asyncio.gather(*(client.match(chain) for _ in range(10)), return_exceptions=True)
        return [type(each).__name__ for each in results], type(client.last_failure).__name__

    assert run(daemon, work, failures=failures) == (ends, last)


def test_queued_requests_arrive_whole_and_in_their_order(daemon: FakeDaemon) -> None:
    """What the daemon does not read at once it finds when it continues, also the request of a cancelled task."""

    async def work(client: AsyncClient) -> tuple[list[KeyChain], list[list[bytes]], list[Any]]:
        with Unread.of(client) as unread:
            chains = [client.chain([number] * _LONG) for number in range(4)] + [client.chain(range(8))]
            calls = [asyncio.create_task(client.match(chain)) for chain in chains]
            await asyncio.sleep(0)  # each has made its call
            calls[1].cancel()
            messages = await asyncio.to_thread(unread.read, len(calls))
            unread.reply(messages)
            return chains, messages, await asyncio.gather(*calls, return_exceptions=True)

    chains, messages, results = run(daemon, work)
    assert [keys for _, keys in messages] == [chain.keys for chain in chains]
    assert isinstance(results.pop(1), asyncio.CancelledError)
    assert results == [0, 2, 3, 4]


def test_only_so_much_is_queued(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call behind too many bytes fails at once, and is not sent; those before and after it are carried out."""
    monkeypatch.setattr(connection, "UNSENT_BYTES_MAX", _LONG)

    async def work(client: AsyncClient) -> tuple[int, int]:
        with Unread.of(client) as unread:
            first = asyncio.create_task(client.match(client.chain(range(_LONG))))
            await asyncio.sleep(0)  # it has made its call
            with pytest.raises(DaemonSilent, match="does not read"):
                await client.match(client.chain(range(8)))
            messages = await asyncio.to_thread(unread.read, 1)
            third = asyncio.create_task(client.match(client.chain(range(12))))
            messages += await asyncio.to_thread(unread.read, 1)
            unread.reply(messages)
            return await first, await third

    assert run(daemon, work) == (0, 1)


def test_socket_that_takes_nothing_costs_one_deadline(connect: Connect) -> None:
    """Where failures are misses, calls behind the first one that is not taken are none; releases are sent later."""
    client = connect(failures="miss")
    chain = client.chain(range(_LONG))
    held = [client.acquire(str(number), client.chain(range(8))) for number in range(2)]
    client._channel.deadline_ms = 200
    with Unread.of(client) as unread, ThreadPoolExecutor(1) as thread:
        with client.batch() as batch:
            calls = [batch.acquire(f"long {number}", chain) for number in range(5)]
        for lease in held:
            lease.release()
        reading = thread.submit(unread.read, 4)
        while not reading.done():
            client.match(chain)  # a miss, which sends what is queued
    opened = FailureReason.CIRCUIT_OPEN
    assert [call.result().reason for call in calls] == [opened, FailureReason.UNREACHABLE, opened, opened, opened]
    assert [type(decode_request(header)) for header, *_ in reading.result()] == [Acquire, Match, Release, Release]


def test_release_that_meets_a_full_socket_is_sent_later(connect: Connect) -> None:
    """Where failures are misses, a release that is the first to find the socket full is not lost."""
    client = connect(failures="miss")
    lease, chain = client.acquire("held", client.chain(range(8))), client.chain(range(_LONG))
    client._channel.deadline_ms = 200
    with Unread.of(client) as unread, ThreadPoolExecutor(1) as thread:
        prefetch = client.begin_prefetch(chain)
        lease.release()
        reading = thread.submit(unread.read, 3)
        while not reading.done():
            client.match(chain)
        prefetch.abandon()
    assert isinstance(decode_request(reading.result()[-1][0]), Release)


def test_loop_does_not_wait_for_the_reply_to_a_probe(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a load that took too long the next call is carried out, though it is in doubt whether the daemon hangs."""
    monkeypatch.setattr(misses, "PROBE_GRACE_NS", _PATIENCE_MS * 1_000_000)

    def script(request: Request, _: list[bytes]) -> Answer:
        if isinstance(request, Acquire):
            frames: list[bytes] = [pack_ranges([(4, 1)]), pack_ranges([(6, 1)])]
            return Acquired(id=request.id, lease=7, hit=1, ready=0, loads=(LoadTicket(5, 0),)), frames
        is_probe = isinstance(request, Match) and not request.tokens
        return (SILENCE, []) if is_probe or isinstance(request, Load) else None

    async def work(client: AsyncClient) -> tuple[FailureReason | None, int]:
        lease = await client.acquire("r", client.chain(range(8)))
        client._channel.deadline_ms = 200
        await lease.wait_loaded()
        client._channel.deadline_ms = _PATIENCE_MS
        return lease.reason, await client.match(client.chain(range(8)))

    daemon.script = script
    assert run(daemon, work, failures="miss") == (FailureReason.DEADLINE, 2)


def test_forked_child_leaves_the_loop_to_its_parent(daemon: FakeDaemon) -> None:
    """A child that calls its copy of a client, and closes it, keeps no reply from the parent's tasks."""

    async def work(client: AsyncClient) -> tuple[int, int]:
        chain = client.chain(range(8))
        has_come, reply = arrival(daemon, Match), held_reply(daemon, Match)
        waiting = asyncio.create_task(client.match(chain))
        assert await has_come()
        reply.set()
        assert is_readable(client)  # and the loop has not seen it
        child = os.fork()
        if child == 0:
            os._exit(_call_and_close(client, chain))
        _, status = os.waitpid(child, 0)  # noqa: ASYNC222 - the child needs nothing of this loop
        return os.waitstatus_to_exitcode(status), await waiting

    assert run(daemon, work, deadline_ms=2 * _PATIENCE_MS) == (0, 2)


def _call_and_close(client: AsyncClient, chain: KeyChain) -> int:
    """A forked child's exit status: 0 if its call is refused, and closing works."""

    async def close() -> None:
        with pytest.raises(RuntimeError, match="belongs to process"):
            await client.match(chain)
        client.replies().close()
        await client.aclose()

    try:
        asyncio.run(close())
    except BaseException:  # noqa: BLE001 - the child must not go on as a second pytest
        return 1
    return 0
