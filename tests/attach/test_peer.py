from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvcached.process.peer import PeerProcess, UnseenProcess
from kvcached.process.seqpacket import Credentials
from kvcached_client.errors import ErrorCode, Refused
from tests.access.grants import OWN
from tests.attach.peers import own_pidfd
from tests.worker.groups import open_descriptors

#: An option that no kernel has.
NO_OPTION = 9999


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    """One end of a connection whose peer is this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours


@pytest.fixture(params=["kernel", "sent"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the pidfd comes from."""
    if request.param == "sent":
        monkeypatch.setattr("kvcached.process.peer._SO_PEERPIDFD", NO_OPTION)
    return str(request.param)


@contextmanager
def descriptors(*opened: int) -> Iterator[tuple[int, ...]]:
    yield opened
    for descriptor in opened:
        os.close(descriptor)


def test_peer_is_who_the_kernel_says(connection: socket.socket, way: str) -> None:
    """Ids come from the peer's credentials, and a live process is not dead, by the kernel's pidfd and by a sent one."""
    with descriptors(own_pidfd()) as sent:
        peer = PeerProcess.of(connection, sent, OWN)

        assert (peer.pid, peer.uid, peer.gid) == (os.getpid(), os.geteuid(), os.getegid())
        assert not peer.is_dead()
        assert not os.get_inheritable(peer.fileno())
        peer.close()


def test_peer_closes_its_descriptor_once(connection: socket.socket, way: str) -> None:
    """A peer closes its own pidfd on the first close, never a descriptor that got its number later."""
    with descriptors(own_pidfd()) as sent:
        before = open_descriptors()
        peer = PeerProcess.of(connection, sent, OWN)
        peer.close()
        assert open_descriptors() == before

        reused = os.dup(sent[0])
        peer.close()
        os.close(reused)

        assert peer.fileno() == -1
        assert not peer.is_dead()  # not known to be: what it could write stays set aside


def test_peer_that_died_stays_dead(way: str, run_dir: str) -> None:
    """A process is dead as soon as it has ended, reaped or not, and that is remembered after the close."""
    path = f"{run_dir}/s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        program = (
            "import os, socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1]);"
            "socket.send_fds(s, [b'-'], [os.pidfd_open(os.getpid())]); input()"
        )
        with subprocess.Popen([sys.executable, "-c", program, path], stdin=subprocess.PIPE) as process:
            accepted, _ = listener.accept()
            with accepted:
                _, sent, _, _ = socket.recv_fds(accepted, 10, 2)
                peer = PeerProcess.of(accepted, sent, OWN)
                alive = not peer.is_dead()
                process.kill()
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

                assert alive
                assert peer.is_dead()
                peer.close()
                assert peer.is_dead()
                with pytest.raises(Refused):
                    PeerProcess.of(accepted, sent, OWN)
                for descriptor in sent:
                    os.close(descriptor)


def test_peer_of_an_old_kernel_needs_a_pidfd(connection: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without SO_PEERPIDFD a peer that sends no descriptor, another file or another process's pidfd is refused."""
    monkeypatch.setattr("kvcached.process.peer._SO_PEERPIDFD", NO_OPTION)
    with descriptors(os.pidfd_open(os.getppid()), os.open("/dev/null", os.O_RDONLY)) as wrong:
        before = open_descriptors()
        for sent in ((), wrong):
            with pytest.raises(Refused, match=f"process {os.getpid()} sent no pidfd of its own") as caught:
                PeerProcess.of(connection, sent, OWN)
            assert caught.value.code is ErrorCode.UNAUTHENTICATED

        assert open_descriptors() == before


def test_peer_finds_its_pidfd_among_others(connection: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without SO_PEERPIDFD the right descriptor is used, whatever else came along."""
    monkeypatch.setattr("kvcached.process.peer._SO_PEERPIDFD", NO_OPTION)
    with descriptors(os.pidfd_open(os.getppid()), own_pidfd()) as sent:
        peer = PeerProcess.of(connection, sent, OWN)

        assert peer.pid == os.getpid()
        assert not peer.is_dead()
        peer.close()


def test_two_connections_of_a_process_are_one_process_and_others_are_not(connection: socket.socket) -> None:
    """Peers are compared by what the kernel says of the process, not by the connection that they came by."""
    with descriptors(own_pidfd()) as sent:
        mine, again = PeerProcess.of(connection, sent, OWN), PeerProcess.of(connection, sent, OWN)
    other = PeerProcess(Credentials(mine.pid + 1, 0, 0), os.pidfd_open(os.getppid()), OWN)
    try:
        assert mine.is_same_process(again)
        assert not mine.is_same_process(other)
        assert not mine.is_same_process(UnseenProcess())
    finally:
        for peer in (mine, again, other):
            peer.close()
