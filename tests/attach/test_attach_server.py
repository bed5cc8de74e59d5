from __future__ import annotations

import asyncio
import os
import random
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from kvcached.process.access import Access, Users
from kvcached.server import attach as server_module
from kvcached.server import connections, listener
from kvcached_client.errors import ErrorCode, Fault
from kvcached_client.protocol.attach import (
    ATTACH_MESSAGE_SIZE_BYTES_MAX,
    JOINED_DESCRIPTORS,
    AttachRefused,
    ClaimPool,
    Identified,
    Identify,
    Join,
    Leave,
    encode_attach,
)
from tests.attach.peers import (
    IDENTIFIED,
    JOIN,
    JOINED,
    Client,
    Handler,
    client_in,
    engine,
    own_pidfd,
    path_in,
    printed,
    serving,
)
from tests.worker.groups import RunLoop, names_in, open_descriptors


def test_server_answers_what_the_handler_says(run: RunLoop, run_dir: str) -> None:
    """Identify and Join get the handler's answers, Join with all descriptors, and both see the process that asked."""

    async def main() -> None:
        memory = os.memfd_create("pool")
        os.ftruncate(memory, 4321)
        handler = Handler((memory,) * JOINED_DESCRIPTORS)
        async with serving(run_dir, handler):
            with client_in(run_dir) as client:
                assert await client.ask(Identify(client="me")) == IDENTIFIED
                client.send(JOIN)
                answer = await client.receive()

            assert answer is not None
            assert answer[0] == JOINED
            assert [os.fstat(descriptor).st_size for descriptor in answer[1]] == [4321] * JOINED_DESCRIPTORS
            assert handler.identified == handler.joined
            assert handler.identified[0].pid == os.getpid()
        os.fstat(memory)
        os.close(memory)
        for descriptor in answer[1]:
            os.close(descriptor)

    run(main())


def test_server_passes_a_refusal_on_and_closes(run: RunLoop, run_dir: str) -> None:
    """What the handler refuses is answered with its error, the connection is closed, and the peer is not watched."""

    async def main() -> None:
        before = open_descriptors()
        async with serving(run_dir, Handler()) as server:
            listening = open_descriptors()
            with client_in(run_dir) as client:
                refusal = await client.ask(Join(session=7, token=bytes(32), shard=0))
                assert await client.receive() is None
            assert refusal == AttachRefused(
                code=ErrorCode.UNAUTHENTICATED,
                fault=Fault.CALLER,
                message="not the token of session 7",
                fix="use its token",
            )
            assert server.refusals == {ErrorCode.UNAUTHENTICATED: 1}
            assert open_descriptors() == listening
        assert open_descriptors() == before

    run(main())


MALFORMED = {
    "text": b"GET / HTTP/1.1",
    "not msgpack": b"\xc1",
    "array bomb": b"\xdd\xff\xff\xff\xff",
    "nesting bomb": b"\x91" * 10_000,
    "pickle": b"\x80\x04\x95\x10\x00\x00\x00",
    "reply": encode_attach(IDENTIFIED),
    "other field": encode_attach(Identify()).replace(b"client", b"clienx"),
    "short token": encode_attach(Join(session=1, token=bytes(5), shard=0)),
    "negative shard": encode_attach(Join(session=1, token=bytes(32), shard=-1)),
    "bad unicode": encode_attach(Identify(client="abc")).replace(b"abc", b"\xff\xfe\xfd"),
}


@pytest.mark.parametrize("message", MALFORMED.values(), ids=MALFORMED.keys())
def test_server_refuses_malformed_messages(run: RunLoop, run_dir: str, message: bytes) -> None:
    """A message that is none is answered as malformed, the connection is closed, and the next peer is served."""

    async def main() -> None:
        async with serving(run_dir, Handler()):
            with client_in(run_dir) as client:
                refusal = await client.ask(message)
                assert isinstance(refusal, AttachRefused)
                assert refusal.code is ErrorCode.MALFORMED
                assert await client.receive() is None
            with client_in(run_dir) as client:
                assert isinstance(await client.ask(Identify()), Identified)

    run(main())


def test_server_refuses_oversize_messages(run: RunLoop, run_dir: str) -> None:
    """A message over the limit is refused by its size, and so is one with more descriptors than the limit."""

    async def main() -> None:
        async with serving(run_dir, Handler()) as server:
            with client_in(run_dir) as client:
                large = await client.ask(bytes(ATTACH_MESSAGE_SIZE_BYTES_MAX + 1))
            pidfd = own_pidfd()
            with client_in(run_dir) as client:
                many = await client.ask(Identify(), *[pidfd] * 30)
            os.close(pidfd)

            for refusal in (large, many):
                assert isinstance(refusal, AttachRefused)
                assert refusal.code is ErrorCode.OVERSIZE
            assert server.refusals == {ErrorCode.OVERSIZE: 2}

    run(main())


#: The message's first bytes, which hold no value that could be another: map, "op", "join", "session".
JOIN_NAMES = 17


def test_server_leaks_no_descriptor(run: RunLoop, run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand bad messages with up to four descriptors each leave none of them open."""
    monkeypatch.setattr(listener, "FAULT_PAUSE_S", 0.0)  # after each fault, which would take a minute in all

    async def main() -> None:
        chance = random.Random(5)
        pidfd = own_pidfd()
        async with serving(run_dir, Handler()) as server:
            before = open_descriptors()
            for _ in range(1000):
                message = bytearray(encode_attach(JOIN))
                message[chance.randrange(JOIN_NAMES)] ^= 1 << chance.randrange(8)
                with client_in(run_dir) as client:
                    client.send(bytes(message), *[pidfd] * chance.randrange(5))
                    answer = await client.receive()
                    assert answer is not None
                    assert isinstance(answer[0], AttachRefused)
                    assert await client.receive() is None

            assert open_descriptors() == before
            assert server.refusals.total() == 1000
        os.close(pidfd)

    run(main())


def test_server_refuses_other_users(run: RunLoop, run_dir: str) -> None:
    """A process of a user who is not allowed is refused, whoever the allowed ones are."""

    async def main() -> None:
        handler = Handler()
        async with serving(run_dir, handler, Access(os.geteuid() + 1)) as server:
            with client_in(run_dir) as client:
                refusal = await client.ask(Identify())
                assert isinstance(refusal, AttachRefused)
                assert f"user {os.geteuid()} has no role here" in refusal.message
                assert await client.receive() is None

            assert server.refusals == {ErrorCode.UNAUTHENTICATED: 1}
            assert not handler.identified

    run(main())


def test_server_gives_nothing_to_who_is_no_engine(run: RunLoop, run_dir: str) -> None:
    """Who may look and operate gets neither a member token nor memory: the handler is not asked."""

    async def main() -> None:
        handler = Handler()
        user = Users(frozenset({os.geteuid()}))
        async with serving(run_dir, handler, Access(os.geteuid() + 1, operate=user, look=user)) as server:
            for request in (Identify(), JOIN, ClaimPool(name="n", claim="c", ranks=1, rank_bytes=1, blocks=1)):
                with client_in(run_dir) as client:
                    refusal = await client.ask(request)
                    assert isinstance(refusal, AttachRefused)
                    assert "needs the role engine" in refusal.message
            assert server.refusals == {ErrorCode.FORBIDDEN: 3}
            assert not handler.identified
            assert not handler.joined

    run(main())


@pytest.mark.parametrize("is_allowed", [True, False])
def test_silent_connections_lose_their_places(
    run: RunLoop, run_dir: str, monkeypatch: pytest.MonkeyPatch, *, is_allowed: bool
) -> None:
    """Whoever connects again and again and asks nothing loses its oldest connections; one that asks is served."""
    monkeypatch.setattr(connections, "HALF_OPEN_MAX", 2)

    async def main() -> None:
        uid = os.geteuid() + (not is_allowed)
        async with serving(run_dir, Handler(), Access(uid)):
            silent = [Client(run_dir) for _ in range(20)]
            with client_in(run_dir) as asking:
                answer = await asking.ask(Identify())
                assert isinstance(answer, Identified if is_allowed else AttachRefused)
            assert await silent[0].receive() is None
            for client in silent:
                client.socket.close()

    run(main())


def test_silent_connection_is_dropped_in_time(run: RunLoop, run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that has asked stays; one that has not is dropped when its time is over, within all limits too."""
    monkeypatch.setattr(connections, "HALF_OPEN_S_MAX", 0.02)

    async def main() -> None:
        async with serving(run_dir, Handler()):
            with client_in(run_dir) as asking, client_in(run_dir) as silent:
                assert await asking.ask(Identify()) == IDENTIFIED
                assert await silent.receive() is None
                assert await asking.ask(Identify()) == IDENTIFIED

    run(main())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_server_refuses_a_process_of_another_user(run: RunLoop, run_dir: str) -> None:
    """A process that runs as another user is refused though the socket's permissions let it connect."""
    Path(run_dir).chmod(0o755)

    async def main() -> None:
        handler = Handler()
        async with serving(run_dir, handler) as server:
            os.chmod(path_in(run_dir), 0o777)  # noqa: PTH101, S103
            with engine(run_dir, uid=65534) as process:
                assert int(await printed(process)) > 0

            assert server.refusals == {ErrorCode.UNAUTHENTICATED: 1}
            assert not handler.identified

    run(main())


def test_server_socket_is_its_users_alone(run: RunLoop, run_dir: str) -> None:
    """The socket gives no permission to group and others, whatever the umask."""

    async def main() -> None:
        previous = os.umask(0)
        async with serving(run_dir, Handler()):
            os.umask(previous)
            assert os.stat(path_in(run_dir)).st_mode & 0o077 == 0  # noqa: PTH116

    run(main())


def test_server_tells_who_leaves(run: RunLoop, run_dir: str) -> None:
    """A process that joined may leave: the handler is told, and its connection ends. Any other one is refused."""

    async def main() -> None:
        handler = Handler()
        async with serving(run_dir, handler):
            with client_in(run_dir) as client:
                assert await client.ask(JOIN) == JOINED
                client.send(Leave())
                assert await handler.closed.get() is handler.joined[0]
                assert handler.left == handler.joined
            with client_in(run_dir) as stranger:
                refusal = await stranger.ask(Leave())
                assert isinstance(refusal, AttachRefused)
                assert refusal.code is ErrorCode.BAD_VALUE
        assert len(handler.left) == 1

    run(main())


def test_server_bounds_connections(run: RunLoop, run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection over the limit is refused; when one closes, there is room again."""
    monkeypatch.setattr(server_module, "CONNECTIONS_MAX", 3)

    async def main() -> None:
        handler = Handler()
        async with serving(run_dir, handler):
            clients = [Client(run_dir) for _ in range(3)]
            for client in clients:
                await client.ask(Identify())
            with client_in(run_dir) as fourth:
                refusal = await fourth.ask(Identify())
                assert isinstance(refusal, AttachRefused)
                assert refusal.code is ErrorCode.LIMIT
            clients[0].socket.close()
            await handler.closed.get()
            with client_in(run_dir) as fifth:
                assert await fifth.ask(Identify()) == IDENTIFIED
            for client in clients:
                client.socket.close()

    run(main())


def test_server_survives_a_broken_handler(run: RunLoop, run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error inside the handler is answered as the daemon's fault, and the next peer is served."""

    async def main() -> None:
        handler = Handler()
        async with serving(run_dir, handler):
            with monkeypatch.context() as broken, client_in(run_dir) as client:
                broken.setattr(handler, "identify", None)
                refusal = await client.ask(Identify())
                assert isinstance(refusal, AttachRefused)
                assert (refusal.code, refusal.fault) == (ErrorCode.INTERNAL, Fault.DAEMON)
            with client_in(run_dir) as client:
                assert await client.ask(Identify()) == IDENTIFIED

    run(main())


def test_server_drops_a_peer_that_reads_no_answers(run: RunLoop, run_dir: str) -> None:
    """A peer that asks on and on without reading is disconnected instead of being queued for."""

    async def main() -> None:
        handler = Handler()
        async with serving(run_dir, handler):
            with client_in(run_dir) as client:
                client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
                while handler.closed.empty():
                    with suppress(BlockingIOError, ConnectionError):
                        client.send(Identify())
                    await asyncio.sleep(0)

            assert handler.closed.qsize() == 1

    run(main())


def test_server_replaces_a_dead_socket_but_not_a_live_one(run: RunLoop, run_dir: str) -> None:
    """A socket left over by a dead daemon is replaced; one that is served is not."""

    async def main() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
            dead.bind(path_in(run_dir))
        async with serving(run_dir, Handler()):
            with pytest.raises(OSError, match="another process serves"):
                server_module.AttachServer(path_in(run_dir), Handler(), Access()).start()
            with client_in(run_dir) as client:
                assert await client.ask(Identify()) == IDENTIFIED
        assert names_in(run_dir) == []

    run(main())


def test_server_removes_no_socket_but_its_own(run: RunLoop, run_dir: str) -> None:
    """A server whose socket somebody has removed leaves the next server's socket in its place when it ends."""

    async def main() -> None:
        async with serving(run_dir, Handler()) as first:
            os.rename(path_in(run_dir), Path(run_dir) / "away")  # noqa: PTH104 - so that it keeps its inode
            async with serving(run_dir, Handler()):
                first.close()
                with client_in(run_dir) as client:
                    assert isinstance(await client.ask(Identify()), Identified)
        assert names_in(run_dir) == ["away"]

    run(main())


def test_server_spares_a_file_that_is_no_socket(run: RunLoop, run_dir: str) -> None:
    """A file in the socket's place is an error and stays as it is."""
    Path(path_in(run_dir)).write_text("precious")

    async def main() -> None:
        with pytest.raises(OSError, match="in use"):
            server_module.AttachServer(path_in(run_dir), Handler(), Access()).start()

    run(main())
    assert Path(path_in(run_dir)).read_text() == "precious"


def test_server_names_a_path_that_is_too_long(run: RunLoop, run_dir: str) -> None:
    """A socket path that the kernel cannot take is an error with that path in it, and the umask is as before."""
    long = f"{run_dir}/{'x' * 108}"

    async def main() -> None:
        with pytest.raises(OSError, match=f"path too long: {long}"):
            server_module.AttachServer(long, Handler(), Access()).start()

    previous = os.umask(0o022)
    run(main())
    assert os.umask(previous) == 0o022
