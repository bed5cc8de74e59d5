"""The manager's end: whom it believes, and what it keeps."""

from __future__ import annotations

import array
import gc
import logging
import os
import re
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcached.process.notify import READY, notify
from kvcached.recovery.fd_store import KEPT_MAX, KeptDescriptors, Notice, NoticeSocket, remove, store
from tests.client.descriptors import no_descriptor_left


@pytest.fixture
def notices(monkeypatch: pytest.MonkeyPatch) -> Iterator[NoticeSocket]:
    """A manager's socket, which this process's own notifications go to."""
    notices = NoticeSocket()
    monkeypatch.setenv("NOTIFY_SOCKET", notices.name)
    yield notices
    notices.close()


@pytest.fixture
def kept() -> Iterator[KeptDescriptors]:
    kept = KeptDescriptors()
    yield kept
    kept.close()


def open_descriptors() -> int:
    gc.collect()  # else it may be earlier tests' garbage that closes some
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_messages_of_the_daemon_are_heard(notices: NoticeSocket) -> None:
    """Everything that the one process says arrives, in order, and an empty socket is no wait."""
    notify(READY)
    notify("FDNAME=a=b\nnothing\nX=1")

    fields = [notice.fields for notice in notices.messages(os.getpid())]

    assert fields == [{"READY": "1"}, {"FDNAME": "a=b", "X": "1"}]
    assert list(notices.messages(os.getpid())) == []


def test_messages_of_others_are_not_believed(
    notices: NoticeSocket, memfd: Callable[[bytes], int], caplog: pytest.LogCaptureFixture
) -> None:
    """What another process says is logged and dropped, its descriptors closed, also while there is no daemon."""
    descriptor, before = memfd(b""), open_descriptors()
    for pid in (os.getppid(), 0):
        store("pool", descriptor)

        with caplog.at_level(logging.WARNING, "kvcached"):
            assert list(notices.messages(pid)) == []

    assert [f"of process {os.getpid()}" in message for message in caplog.messages] == [True]
    assert open_descriptors() == before


def test_flood_of_messages_is_one_line_a_minute(
    notices: NoticeSocket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Thousands of messages that are not believed make one log line, and one with their number a minute later."""
    now_s = 1000.0
    monkeypatch.setattr("kvcached.recovery.fd_store.time.monotonic", lambda: now_s)

    def flood(count: int) -> None:
        for _ in range(count):
            notify(READY)
            assert list(notices.messages(0)) == []

    flood(3000)
    assert len(caplog.messages) == 1
    now_s += 61
    flood(2)

    assert len(caplog.messages) == 2
    assert caplog.messages[1].startswith("3000 notifications were not believed")


def test_no_other_user_reaches_the_socket(notices: NoticeSocket) -> None:
    """The socket is a path in a directory that only its user may enter, and goes with it."""
    directory = Path(notices.name).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert Path(notices.name).is_socket()

    notices.close()

    assert not directory.exists()


def test_socket_finds_a_directory_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no path below TMPDIR will do, the socket is in /dev/shm, as in a container with a read-only file system."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 30)))

    notices = NoticeSocket()

    assert notices.name.startswith("/dev/shm/kvcached-notify-")  # noqa: S108
    notices.close()


def test_directories_of_killed_supervisors_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose socket nobody has any more; a living supervisor's stays, and so does one that is just being made."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    living = NoticeSocket()
    killed = NoticeSocket()
    killed._socket.close()
    (tmp_path / "kvcached-notify-new").mkdir()
    (tmp_path / "other").mkdir()
    last = NoticeSocket()

    kept = {Path(notices.name).parent.name for notices in (living, last)}
    assert {path.name for path in tmp_path.iterdir()} == kept | {"kvcached-notify-new", "other"}
    living.close()
    last.close()


def test_without_any_directory_the_error_names_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no directory can be written the start fails, and the message says which variable to set."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    monkeypatch.setattr("kvcached.recovery.fd_store._LAST_RESORT", str(tmp_path / "none"))

    with pytest.raises(OSError, match="name a directory that can be written in TMPDIR"):
        NoticeSocket()


def test_messages_that_were_cut_are_not_believed(
    notices: NoticeSocket,
    memfd: Callable[[bytes], int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A message with more bytes or descriptors than a daemon sends is dropped whole."""
    descriptor, before = memfd(b""), open_descriptors()
    address = notices.name
    monkeypatch.setattr("kvcached.recovery.fd_store._REFUSAL_LOG_PAUSE_S", 0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"READY=1\n" + b"x" * 5000, address)
        many = array.array("i", [descriptor] * 17)
        sender.sendmsg([b"FDSTORE=1"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, many)], 0, address)

    with caplog.at_level(logging.WARNING, "kvcached"):
        assert list(notices.messages(os.getpid())) == []

    assert ["more than" in message for message in caplog.messages] == [True, True]
    assert open_descriptors() == before


def test_message_whose_descriptor_finds_no_place_is_told_apart(
    notices: NoticeSocket, memfd: Callable[[bytes], int], caplog: pytest.LogCaptureFixture
) -> None:
    """Where this process has too many files open, the log names that limit, not the size of the message."""
    store("pool", memfd(b""))

    with caplog.at_level(logging.WARNING, "kvcached"), no_descriptor_left():
        assert list(notices.messages(os.getpid())) == []

    (message,) = caplog.messages
    assert re.search(r"no descriptor is free: this process may have \d+ files open; raise LimitNOFILE=", message)


def test_what_is_stored_is_kept_until_it_is_removed(
    notices: NoticeSocket, kept: KeptDescriptors, memfd: Callable[[bytes], int]
) -> None:
    """Stored descriptors are there under their names, after the sender has closed its own; removed ones are closed."""
    pools = {content: memfd(content) for content in (b"1", b"2", b"3")}
    before = open_descriptors()
    for name, content in (("a", b"1"), ("b", b"2"), ("a", b"3")):
        descriptor = os.dup(pools[content])
        store(name, descriptor)
        os.close(descriptor)
    for notice in notices.messages(os.getpid()):
        kept.take(notice)

    assert kept.names == ["a", "b", "a"]
    assert [os.pread(descriptor, 9, 0) for descriptor in kept.descriptors] == [b"1", b"2", b"3"]

    remove("a")
    for notice in notices.messages(os.getpid()):
        kept.take(notice)

    assert (kept.names, len(kept)) == (["b"], 1)
    assert open_descriptors() == before + 1


def test_same_memory_is_kept_once(notices: NoticeSocket, kept: KeptDescriptors, memfd: Callable[[bytes], int]) -> None:
    """A daemon that stores its pool at every start does not fill the store."""
    descriptor, before = memfd(b""), open_descriptors()
    for _ in range(3):
        store("pool", descriptor)
    for notice in notices.messages(os.getpid()):
        kept.take(notice)

    assert (kept.names, open_descriptors()) == (["pool"], before + 1)


def test_other_files_of_one_inode_are_not_one_memory(kept: KeptDescriptors, memfd: Callable[[bytes], int]) -> None:
    """Memories of a CUDA device that share an inode stay two: the next daemon cannot tell them apart."""
    for _ in range(2):
        kept.take(Notice({"FDSTORE": "1", "FDNAME": "device-r-0"}, [os.open("/dev/null", os.O_RDWR)]))
    kept.take(Notice({"FDSTORE": "1", "FDNAME": "device-r-0"}, [os.dup(memfd(b""))]))

    assert kept.names == ["device-r-0"] * 3


def test_store_has_a_limit(
    kept: KeptDescriptors, memfd: Callable[[bytes], int], caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond so many descriptors nothing more is kept, and that is logged."""
    for _ in range(KEPT_MAX + 1):
        kept.take(Notice({"FDSTORE": "1", "FDNAME": "x"}, [os.dup(memfd(b""))]))

    assert len(kept) == KEPT_MAX
    assert [str(KEPT_MAX) in message for message in caplog.messages] == [True]


def test_descriptors_that_nobody_asked_to_keep_are_closed(kept: KeptDescriptors, memfd: Callable[[bytes], int]) -> None:
    """A descriptor beside another message is not kept; one under an impossible name is, without the name."""
    memory = memfd(b"")
    before = open_descriptors()

    kept.take(Notice({"READY": "1"}, [os.dup(memory)]))

    assert (len(kept), open_descriptors()) == (0, before)

    kept.take(Notice({"FDSTORE": "1", "FDNAME": "a:b"}, [os.dup(memory)]))
    kept.take(Notice({"FDSTORE": "1"}, [os.dup(memory)]))

    assert kept.names == ["unknown", "stored"]
