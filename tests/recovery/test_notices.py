"""The manager's end: whom it believes, and what it keeps."""

from __future__ import annotations

import array
import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcached.descriptor_store import remove, store
from kvcached.notices import KEPT_MAX, KeptDescriptors, Notice, NoticeSocket
from kvcached.notify import READY, notify


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

    assert [f"of process {os.getpid()}" in message for message in caplog.messages] == [True, True]
    assert open_descriptors() == before


def test_messages_that_were_cut_are_not_believed(
    notices: NoticeSocket, memfd: Callable[[bytes], int], caplog: pytest.LogCaptureFixture
) -> None:
    """A message with more bytes or descriptors than a daemon sends is dropped whole."""
    descriptor, before = memfd(b""), open_descriptors()
    address = "\0" + notices.name[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"READY=1\n" + b"x" * 5000, address)
        many = array.array("i", [descriptor] * 17)
        sender.sendmsg([b"FDSTORE=1"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, many)], 0, address)

    with caplog.at_level(logging.WARNING, "kvcached"):
        assert list(notices.messages(os.getpid())) == []

    assert ["more than" in message for message in caplog.messages] == [True, True]
    assert open_descriptors() == before


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
