"""What goes to the service manager and comes back: descriptors under names."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcached.process.notify import READY, WAIT_S, notify, notify_now, send_unsent, unsent
from kvcached.recovery import fd_store as descriptor_store
from kvcached.recovery.fd_store import VARIABLES, remove, store, take_stored, taken_in


@pytest.fixture
def given(memfd: Callable[[bytes], int], monkeypatch: pytest.MonkeyPatch) -> Iterator[range]:
    """Three consecutive descriptors that a child would inherit, where a manager puts them."""
    source, start = memfd(b"pool"), 300
    descriptors = range(start, start + 3)
    for descriptor in descriptors:
        os.dup2(source, descriptor)
    monkeypatch.setattr(descriptor_store, "FIRST_DESCRIPTOR", start)
    yield descriptors
    for descriptor in descriptors:
        try:
            os.close(descriptor)
        except OSError:
            continue


@pytest.fixture
def announce(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the three variables as a manager does."""

    def set_variables(count: object, names: str | None, pid: object = None) -> None:
        monkeypatch.setenv("LISTEN_PID", str(os.getpid() if pid is None else pid))
        monkeypatch.setenv("LISTEN_FDS", str(count))
        if names is not None:
            monkeypatch.setenv("LISTEN_FDNAMES", names)

    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    return set_variables


def test_stored_descriptors_come_back_by_name(given: range, announce: Callable[..., None]) -> None:
    """Each descriptor is under its name, in the order of the manager, and no child inherits it or the variables."""
    announce(3, "pool:other:pool")

    assert take_stored() == {"pool": [given[0], given[2]], "other": [given[1]]}
    assert all(fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for descriptor in given)
    assert not set(VARIABLES) & set(os.environ)


def test_stored_descriptors_are_taken_once(given: range, announce: Callable[..., None]) -> None:
    """A second call finds nothing: whoever has a descriptor is the only one who closes it."""
    announce(1, "pool")

    assert take_stored() == {"pool": [given[0]]}
    assert take_stored() == {}


def test_nothing_stored_is_no_news(announce: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    """Without the variables nothing is taken and nothing is logged."""
    assert take_stored() == {}
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("count", "pid"),
    [("1", "1"), ("x", None), ("-1", None), ("", None), ("9" * 5000, None), ("1025", None), ("²", None)],
)
def test_variables_that_make_no_sense_are_not_believed(
    count: str, pid: str | None, given: range, announce: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """Another process's number, and no number at all: one log line, no descriptor taken, the variables gone."""
    announce(count, "pool", pid)

    with caplog.at_level(logging.WARNING, "kvcached"):
        assert take_stored() == {}

    assert len(caplog.messages) == 1
    assert "LISTEN_" in caplog.messages[0]
    assert not set(VARIABLES) & set(os.environ)
    assert not any(fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for descriptor in given)


@pytest.mark.parametrize("names", [None, "", "pool", "a:b:c:d"])
def test_descriptors_without_names_are_unknown(names: str | None, given: range, announce: Callable[..., None]) -> None:
    """Where names and descriptors do not pair, no name is used: a wrong one would be taken for another."""
    announce(3, names)

    assert take_stored() == {"unknown": list(given)}


def test_descriptors_that_are_not_there_are_left_out(
    given: range, announce: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """A closed descriptor that the manager announces is logged, and the others are taken."""
    os.close(given[1])
    announce(3, "a:b:c")

    with caplog.at_level(logging.WARNING, "kvcached"):
        assert take_stored() == {"a": [given[0]], "c": [given[2]]}

    assert [f"{given[1]} (b)" in message for message in caplog.messages] == [True]


def test_manager_is_asked_to_keep_and_to_drop(
    memfd: Callable[[bytes], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store is one datagram with the descriptor, a removal one without; what arrives is the same memory."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))

        assert store("host-pool", memfd(b"blocks"))
        assert remove("host-pool")

        data, [kept], _, _ = socket.recv_fds(manager, 1000, 4)
        assert set(data.split(b"\n")) == {b"FDSTORE=1", b"FDNAME=host-pool", b"FDPOLL=0"}
        assert os.pread(kept, 100, 0) == b"blocks"
        os.close(kept)
        data, none, _, _ = socket.recv_fds(manager, 1000, 4)
        assert (set(data.split(b"\n")), none) == ({b"FDSTOREREMOVE=1", b"FDNAME=host-pool"}, [])


def test_manager_that_takes_nothing_is_waited_for_once(
    memfd: Callable[[bytes], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped manager costs the daemon one wait, not one for each part of a pool; when it goes on it keeps all."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    waits: list[float] = []

    class Sender(socket.socket):
        def settimeout(self, value: float | None) -> None:
            waits.append(value or 0)
            super().settimeout(0.05 if value else 0)

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setattr("kvcached.process.notify.socket.socket", Sender)
        sent = 0
        while store(f"part-{sent}", memfd(b"")):
            sent += 1
        assert waits == [WAIT_S] * (sent + 1)
        del waits[:]
        parts = [f"part-{number}" for number in range(sent + 64)]
        assert not any(store(name, memfd(b"")) for name in parts[sent + 1 :])
        assert waits == [0] * 63
        assert [name for name, _ in taken_by(manager)] == parts
        assert (store("again", memfd(b"")), store("and again", memfd(b""))) == (True, True)
        assert waits[-2:] == [WAIT_S] * 2


def test_what_was_not_sent_is_sent_later_in_order(
    memfd: Callable[[bytes], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manager that reads again gets what holds then, once and in order, and the memory that was closed meanwhile."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setattr("kvcached.process.notify.WAIT_S", 0.01)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        first, second, third = memfd(b"first"), memfd(b"second"), memfd(b"third")
        before = descriptors_here()
        while notify_now("WATCHDOG=1"):
            pass
        store("host", first)
        remove("host")
        store("host", closed := os.dup(second))
        os.close(closed)
        store("given-up", third)
        remove("given-up")
        for _ in range(3):
            assert not notify(READY)
        assert (unsent(), asyncio.run(taken_in())) == (4, False)

        assert taken_by(manager) == [("host", b""), ("host", b"second"), ("given-up", b""), ("", b"")]
        assert (unsent(), descriptors_here()) == (0, before)


def test_without_a_manager_nothing_is_kept(memfd: Callable[[bytes], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody keeps descriptors, storing and removing do nothing and say so."""
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)

    assert not store("pool", memfd(b""))
    assert not remove("pool")


@pytest.mark.parametrize("name", ["", "a:b", "a\nFDSTOREREMOVE=1", "ä", "x" * 256])
def test_names_that_would_say_something_else_are_refused(name: str, memfd: Callable[[bytes], int]) -> None:
    """A name that the protocol cannot carry is an error of the caller's, and nothing is sent."""
    with pytest.raises(ValueError, match="no name"):
        store(name, memfd(b""))
    with pytest.raises(ValueError, match="no name"):
        remove(name)


def descriptors_here() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def taken_by(manager: socket.socket) -> list[tuple[str, bytes]]:
    """What a manager reads of a process that sends until nothing waits, without pings: names, and what is in memory."""
    found: list[tuple[str, bytes]] = []
    manager.setblocking(False)
    while True:
        try:
            data, kept, _, _ = socket.recv_fds(manager, 1000, 4)
        except BlockingIOError:
            if not unsent():
                return found
            send_unsent()
            continue
        fields = dict(line.split("=") for line in data.decode().split("\n"))
        if "WATCHDOG" not in fields:
            found.append((fields.get("FDNAME", ""), b"".join(os.pread(each, 100, 0) for each in kept)))
        for each in kept:
            os.close(each)


def test_manager_is_not_waited_for_without_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where no descriptor is left, whoever asks hears at once that it is not known what the manager has taken."""

    def refuse(_: int) -> tuple[int, int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def ask() -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pipe2", refuse)
            return await taken_in()

    assert not asyncio.run(ask())
    assert caplog.messages == ["the service manager is not waited for: [Errno 24] Too many open files"]
