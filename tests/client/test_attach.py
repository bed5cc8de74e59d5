"""The attach socket's client against peers that misbehave."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcached_client import (
    Admin,
    BadRequest,
    Client,
    DaemonSilent,
    DaemonUnreachable,
    ErrorCode,
    Fault,
    Refused,
    RequestError,
    SessionGrant,
    map_pool,
)
from kvcached_client.offload import OffloadClient, OffloadLayout
from kvcached_client.protocol.attach import (
    ATTACH_MESSAGE_SIZE_BYTES_MAX,
    JOINED_DESCRIPTORS,
    AttachRefused,
    Identified,
    Identify,
    decode_attach_request,
    encode_attach,
)
from kvcached_client.transport import listener
from kvcached_client.transport.attach import identify, join_host
from kvcached_client.transport.listener import Listener
from tests.client.descriptors import no_descriptor_left, take_all_descriptors

Behaviour = Callable[[socket.socket, bytes, list[int]], None]
_LISTEN_AND_STOP = """
import os, signal, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as own:
    own.bind(sys.argv[1])
    own.listen()
    os.kill(os.getpid(), signal.SIGSTOP)
"""
IDENTIFIED = Identified(member=b"m" * 32, endpoint="ipc:///x", daemon_epoch=1)


@pytest.fixture
def listen(run_dir: Path) -> Iterator[Callable[[Behaviour], Path]]:
    """Starts a peer that accepts one connection, reads one message, and behaves as told."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(run_dir / "attach.sock"))
    listener.listen()
    threads = []

    def start(behave: Behaviour) -> Path:
        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                data, descriptors, _, _ = socket.recv_fds(peer, 16384, 4)
                behave(peer, data, descriptors)
                peer.recv(1)  # until the client closes
            for descriptor in descriptors:
                os.close(descriptor)

        thread = threading.Thread(target=serve)
        thread.start()
        threads.append(thread)
        return run_dir

    yield start
    for thread in threads:
        thread.join()
    listener.close()


def test_identify_sends_its_own_pidfd(listen: Callable[[Behaviour], Path]) -> None:
    """The daemon gets a descriptor by which it can see this very process die, and the answer is returned."""
    seen: list[tuple[object, list[str]]] = []

    def behave(peer: socket.socket, data: bytes, descriptors: list[int]) -> None:
        infos = [Path(f"/proc/self/fdinfo/{descriptor}").read_text() for descriptor in descriptors]
        seen.append((decode_attach_request(data), infos))
        peer.send(encode_attach(IDENTIFIED))

    connection, reply = identify(listen(behave), client="test", deadline_ms=5000)
    assert reply == IDENTIFIED
    assert not connection.is_closed_by_daemon()
    assert os.get_inheritable(connection.fileno()) is False
    connection.close()
    ((request, (info,)),) = seen
    assert request == Identify(client="test")
    assert f"Pid:\t{os.getpid()}\n" in info


def test_nothing_is_said_to_another_users_socket(
    listen: Callable[[Behaviour], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever made a run directory in /tmp first gets no message and no descriptor."""
    said: list[object] = []
    hung_up = threading.Event()

    def behave(_: socket.socket, data: bytes, descriptors: list[int]) -> None:
        said.extend([data, descriptors])
        hung_up.set()

    monkeypatch.setattr(listener, "listener_of", lambda _: Listener(1, os.geteuid() + 1))
    directory = listen(behave)
    with pytest.raises(Refused, match=rf"belongs to user .*{os.geteuid() + 1}.*anybody may have put it there"):
        identify(directory, deadline_ms=5000)
    with pytest.raises(Refused) as caught:
        map_pool(SessionGrant(id=1, token=b"t" * 32, run_dir=str(directory)), deadline_ms=5000)
    assert caught.value.code == ErrorCode.UNAUTHENTICATED
    assert hung_up.wait(20)
    assert said == [b"", []]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_socket_is_told_by_the_kernel(run_dir: Path) -> None:
    """The peer's user is the kernel's word: a listener of another user is refused, for a directory proves nothing."""
    code = (
        "import os, socket, sys; listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET);"
        "listener.bind(sys.argv[1]); os.setuid(65534); listener.listen(); print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(run_dir / "attach.sock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(Refused, match=r"belongs to user .*65534"):
            identify(run_dir, deadline_ms=5000)


def test_refusal_raises_what_the_daemon_says(listen: Callable[[Behaviour], Path]) -> None:
    """A typed refusal becomes the typed error."""
    refusal = AttachRefused(code=ErrorCode.UNAUTHENTICATED, fault=Fault.CALLER, message="who?", fix="same user")
    with pytest.raises(Refused, match="who"):
        identify(listen(lambda peer, *_: peer.send(encode_attach(refusal)) and None), deadline_ms=5000)


def test_process_without_a_descriptor_is_told_its_limit(run_dir: Path) -> None:
    """A process that can open no socket cannot reach the daemon: the error says so, and how many files it may open."""
    with (
        no_descriptor_left(),
        pytest.raises(DaemonUnreachable, match=r"Too many open files: .* \d+ files open"),
    ):
        identify(run_dir, deadline_ms=5000)


def test_answer_whose_descriptors_found_no_place_says_so(listen: Callable[[Behaviour], Path]) -> None:
    """A process that has no descriptor left for what the daemon sends is told its limit, as if it had no socket."""

    def behave(peer: socket.socket, *_: object) -> None:
        memory = os.memfd_create("unasked", os.MFD_CLOEXEC)
        take_all_descriptors()
        socket.send_fds(peer, [encode_attach(IDENTIFIED)], [memory] * 3)  # the asker closes its pidfd: room for one
        os.close(memory)

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with pytest.raises(DaemonUnreachable, match=r"descriptors did not all arrive: .* files open"):
            identify(listen(behave), deadline_ms=5000)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("deadline_ms", [0, -5])
@pytest.mark.parametrize(
    "call",
    [
        lambda run_dir, deadline_ms: identify(run_dir, deadline_ms=deadline_ms),
        lambda run_dir, deadline_ms: Client.connect(run_dir, deadline_ms=deadline_ms),
        lambda run_dir, deadline_ms: Admin.connect(run_dir, deadline_ms=deadline_ms),
        lambda run_dir, deadline_ms: map_pool(
            SessionGrant(id=3, token=bytes(32), run_dir=str(run_dir)), deadline_ms=deadline_ms
        ),
        lambda run_dir, deadline_ms: OffloadClient.connect(
            run_dir,
            engine="e",
            instance=bytes(16),
            keyspace=bytes(32),
            label="m",
            layout=OffloadLayout(block_size=16, shards=1, block_bytes=1024, fingerprint=bytes(16)),
            deadline_ms=deadline_ms,
        ),
    ],
)
def test_deadline_that_has_passed_is_the_callers_mistake(
    run_dir: Path, call: Callable[[Path, int], object], deadline_ms: int
) -> None:
    """No call blames the daemon for a deadline below 1 ms."""
    with pytest.raises(ValueError, match=f"deadline_ms is {deadline_ms}, at least 1 is needed"):
        call(run_dir, deadline_ms)


def test_silent_peer_costs_the_deadline(listen: Callable[[Behaviour], Path]) -> None:
    """A daemon that accepts and says nothing ends in an error that names its process."""
    with pytest.raises(DaemonSilent, match=f"process {os.getpid()} listens at .*, but did not reply within 250 ms"):
        identify(listen(lambda *_: None), deadline_ms=250)


def test_stopped_daemon_is_called_stopped(run_dir: Path) -> None:
    """A daemon under SIGSTOP is said to be stopped, with the command that continues it, also by `connect`."""
    with subprocess.Popen([sys.executable, "-c", _LISTEN_AND_STOP, str(run_dir / "attach.sock")]) as process:
        try:
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            with pytest.raises(DaemonSilent, match=f"it is stopped .* continue it with kill -CONT {process.pid}"):
                Client.connect(run_dir, deadline_ms=100)
        finally:
            process.send_signal(signal.SIGKILL)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may be somebody else")
def test_user_who_may_not_reach_the_socket_is_told_at_once(run_dir: Path) -> None:
    """A user whom the daemon does not serve is refused, with what to do, and does not wait for it to start."""
    os.seteuid(65534)
    try:
        with pytest.raises(Refused, match=r"belongs to user root \(0\).*name this user in the table \[access\]"):
            Client.connect(run_dir, wait_s=5)
    finally:
        os.seteuid(0)


def test_peer_that_hangs_up_is_unreachable(listen: Callable[[Behaviour], Path]) -> None:
    """A connection closed without an answer is no answer."""
    with pytest.raises(DaemonUnreachable):
        identify(listen(lambda peer, *_: peer.shutdown(socket.SHUT_RDWR)), deadline_ms=5000)


@pytest.mark.parametrize("message", [b"\xff", b"\x80", b"x" * (ATTACH_MESSAGE_SIZE_BYTES_MAX + 1)])
def test_unreadable_answer_is_a_typed_error(listen: Callable[[Behaviour], Path], message: bytes) -> None:
    """Bytes that are no reply, or too many of them, raise a request error."""
    with pytest.raises(RequestError):
        identify(listen(lambda peer, *_: peer.send(message) and None), deadline_ms=5000)


@pytest.mark.parametrize("count", [1, JOINED_DESCRIPTORS + 1, JOINED_DESCRIPTORS + 2])
def test_unexpected_descriptors_are_closed(listen: Callable[[Behaviour], Path], count: int) -> None:
    """Descriptors that nobody asked for do not stay open in this process."""
    closed_by_sender = threading.Event()

    def behave(peer: socket.socket, *_: object) -> None:
        memory = os.memfd_create("unasked", os.MFD_CLOEXEC)
        socket.send_fds(peer, [encode_attach(IDENTIFIED)], [memory] * count)
        os.close(memory)
        closed_by_sender.set()

    with pytest.raises(RequestError):
        identify(listen(behave), deadline_ms=5000)
    closed_by_sender.wait()
    assert not any("memfd:unasked" in str(path.resolve()) for path in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("deadline_ms", [1.5, True, "1"])
def test_deadline_is_a_whole_number(tmp_path: Path, deadline_ms: Any) -> None:
    """Another kind of number is refused by its name."""
    with pytest.raises(ValueError, match=r"deadline_ms is .* a whole number is needed"):
        identify(tmp_path, deadline_ms=deadline_ms)


def test_client_is_no_session_grant(tmp_path: Path) -> None:
    """What is asked for has the client: the error names it."""
    nothing: Any = object()
    with pytest.raises(BadRequest, match=r"a object in place of a session grant.*client\.session"):
        map_pool(nothing)
    with pytest.raises(BadRequest, match=r"in place of a session grant"):
        join_host(nothing, 0, deadline_ms=1)
