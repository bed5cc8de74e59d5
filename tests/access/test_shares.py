"""A user other than the daemon's own has a share of places, turns and memory, and takes nobody else's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from kvcached.process.access import Access, Grants, Role
from kvcached.process.seqpacket import Credentials
from kvcached.server import connections as connections_module
from kvcached.server import held as held_module
from kvcached.server import rpc as server_module
from kvcached.server.connection import Connection
from kvcached.server.connections import ConnectionLimits, Connections, limit_needed
from kvcached.server.local import LocalDoor
from kvcached.server.rpc import RpcServer
from kvcached_client.errors import ErrorCode, RequestError
from kvcached_client.protocol.engine import Goodbye, Pause, Stats, encode
from tests.access.grants import OWN, SOMEBODY, access_of, grants_of
from tests.rpc.raw_peer import RawPeer, frame
from tests.rpc.test_server import Serving, held

LIMITS = ConnectionLimits(connections=16, per_process=8, per_user=4, reserved=2, half_open=4, descriptor=1000)
OPERATOR, LOOKER = replace(grants_of(Role.OPERATE), uid=7), grants_of(Role.LOOK)


class Places:
    """The connections of a socket, opened for peers that need not exist."""

    def __init__(self, limits: ConnectionLimits = LIMITS) -> None:
        self.dropped: list[int] = []
        self.connections: Connections[int] = Connections("test", limits, self._drop, Access())
        self._numbers = count()

    def _drop(self, connection: int) -> None:
        self.dropped.append(connection)
        self.connections.close(connection)

    def open(self, grants: Grants, pid: int) -> int:
        number = next(self._numbers)
        self.connections.open(number, Credentials(pid, grants.uid, 1), grants, 5)
        return number

    def admit(self, grants: Grants, pid: int) -> int:
        number = self.open(grants, pid)
        self.connections.admit(number)
        return number

    def fill(self, grants: Grants, pids: range) -> int:
        """One connection for each process, until one is refused; how many got in."""
        for number, pid in enumerate(pids):
            connection = self.open(grants, pid)
            try:
                self.connections.admit(connection)
            except RequestError as error:
                assert error.code is ErrorCode.LIMIT
                self.connections.close(connection)
                return number
        raise AssertionError("nobody was refused")


def in_loop(test: Callable[[], None]) -> None:
    async def main() -> None:
        test()

    asyncio.run(main())


def test_user_with_many_processes_fills_its_own_share() -> None:
    """A user gets no more places by more processes, and another user and the daemon's own find theirs."""

    def test() -> None:
        places = Places()
        assert places.fill(LOOKER, range(100, 200)) == LIMITS.per_user
        assert places.fill(replace(LOOKER, uid=SOMEBODY + 1), range(200, 300)) == LIMITS.per_user
        places.admit(OWN, 1)

    in_loop(test)


@pytest.mark.parametrize("open_files", [10, 150, 1000])
@pytest.mark.parametrize("share", [0.2, 0.5])
def test_limit_of_open_files_that_is_needed_is_the_lowest(
    open_files: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With it, a socket has as many connections as are wanted; with less it has not."""
    monkeypatch.setattr(connections_module, "_open_files", lambda: open_files)

    def made(limit: int) -> int:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
        return ConnectionLimits.within(1000, share).connections

    needed = limit_needed(open_files, 16, share)

    assert [made(needed), made(needed + 100) >= 16] == [16, True]
    assert made(needed - 2) < 16


def test_socket_without_room_names_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the limit leaves room for nobody, nobody is told to close connections that there are not."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    monkeypatch.setattr(connections_module, "_open_files", lambda: 50)
    limits = ConnectionLimits.within(1024, 0.5)

    def test() -> None:
        with pytest.raises(RequestError) as refused:
            Places(limits).admit(OWN, 1)
        assert refused.value.code is ErrorCode.LIMIT
        said = "0 connections are open, and the limit of open files leaves room for 0"
        assert refused.value.message == said
        assert "ulimit -n" in refused.value.fix

    in_loop(test)


def test_place_is_free_again_when_a_connection_of_the_user_ends() -> None:
    """What ends is not counted any more."""

    def test() -> None:
        places = Places()
        first = places.admit(LOOKER, 1)
        assert places.fill(LOOKER, range(2, 100)) == LIMITS.per_user - 1
        places.connections.close(first)
        places.admit(LOOKER, 2)

    in_loop(test)


def test_other_users_leave_places_to_operators() -> None:
    """When users without the role operate have filled all that they may, an operator and the daemon's own get in."""

    def test() -> None:
        places = Places()
        for number in range(4):
            places.fill(replace(LOOKER, uid=SOMEBODY + number), range(100 * number, 100 * number + 100))
        for grants in (OPERATOR, OWN):
            places.admit(grants, 1)
        with pytest.raises(RequestError, match="16 connections are open"):
            places.admit(OWN, 1)

    in_loop(test)


def test_silent_connections_of_many_processes_cost_their_own_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user that opens one silent connection from each of many processes loses its own, not an engine's two."""
    monkeypatch.setattr(connections_module, "HALF_OPEN_S_MAX", 60.0)

    def test() -> None:
        places = Places()
        engines = [places.open(OWN, 1) for _ in range(2)]
        flood = [places.open(LOOKER, pid) for pid in range(100, 110)]
        assert places.dropped == flood[:8]
        for each in engines:
            places.connections.admit(each)

    in_loop(test)


@contextlib.contextmanager
def serving_as_other(path: Path, *roles: Role) -> Iterator[Serving]:
    """A server for which this process is of another user, with these roles."""
    serving = Serving(path / "rpc.sock", replace(access_of(*roles, user=str(os.geteuid())), own_uid=os.geteuid() + 1))
    serving.start()
    try:
        yield serving
    finally:
        serving.stop()


def test_request_without_its_role_is_refused_and_the_next_one_served(tmp_path: Path) -> None:
    """A refused verb never reaches the handler, its error has its id, and the connection goes on."""
    with serving_as_other(tmp_path, Role.LOOK) as serving, RawPeer(serving.path) as peer:
        error = peer.error(encode(Pause(id=5)))
        assert (error.id, error.code) == (5, ErrorCode.FORBIDDEN)
        assert "access.operate" in error.fix
        assert peer.ask(encode(Stats(id=6))) == Goodbye(id=6)
        assert serving.handler.served == [6]


def test_user_without_a_role_is_refused_and_cut_off(tmp_path: Path) -> None:
    """Who has no role gets one answer, which says as whom to come, and no further one."""
    with serving_as_other(tmp_path) as serving, RawPeer(serving.path) as peer:
        error = peer.error(encode(Stats(id=5)))
        assert (error.id, error.code) == (5, ErrorCode.UNAUTHENTICATED)
        assert f"run this as user {os.geteuid() + 1}" in error.fix
        assert peer.receive() is None
        assert serving.handler.served == []


def test_unfinished_messages_of_another_user_are_its_own_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whose messages take more than its share loses the largest, though there is room altogether."""
    monkeypatch.setattr(held_module, "USER_HELD_BYTES_MAX", 100_000)
    with (
        serving_as_other(tmp_path, Role.LOOK) as serving,
        RawPeer(serving.path) as small,
        RawPeer(serving.path) as large,
    ):
        small.socket.sendall(frame(1, encode(Stats(id=1))))
        large.socket.sendall(b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(110_000))
        assert large.receive() is None
        small.socket.sendall(frame(0, b""))
        assert small.reply() is not None


def test_processes_of_another_user_are_one_in_turns_and_pauses() -> None:
    """All connections of another user share turns and pauses, whichever process they are of; own processes do not."""
    as_other = replace(access_of(Role.LOOK, user=str(os.geteuid())), own_uid=os.geteuid() + 1)
    one, other = socket.socketpair()
    with one, other:
        door = LocalDoor(Path(), as_other)
        owners = {door.take_in(each, serial).owner for serial, each in enumerate((one, other))}
        assert len(owners) == 1
        assert owners.isdisjoint({os.getpid()})
        assert LocalDoor(Path(), Access()).take_in(one, 1).owner == os.getpid()


def test_turns_of_another_user_are_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many connections of another user that all have something, few get a turn before others get theirs."""
    rounds: list[int] = []
    on_ready, take_turn = RpcServer._on_ready, RpcServer._take_turn

    def begin(server: RpcServer) -> None:
        rounds.append(0)
        on_ready(server)

    def taken(server: RpcServer, connection: Connection) -> int:
        rounds[-1] += 1
        return take_turn(server, connection)

    monkeypatch.setattr(RpcServer, "_on_ready", begin)
    monkeypatch.setattr(RpcServer, "_take_turn", taken)
    monkeypatch.setattr(server_module, "USER_TURNS_MAX", 2)
    with serving_as_other(tmp_path, Role.LOOK) as serving, contextlib.ExitStack() as stack:
        peers = [stack.enter_context(RawPeer(serving.path)) for _ in range(8)]
        for peer in peers:
            assert peer.ask(encode(Stats(id=1))) == Goodbye(id=1)
        with held(serving):
            for peer in peers:
                peer.send(encode(Stats(id=2)))
        assert all(peer.reply() == Goodbye(id=2) for peer in peers)
        assert max(rounds) == 2
