from __future__ import annotations

import errno
import mmap
import os
import select
import stat
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvcached.memory.progress import ProgressPage
from kvcached_client.blocks.progress import STATE_DONE, STATE_FAILED, STATE_RUNNING
from kvcached_client.types import PROGRESS_SLOTS
from tests.worker.groups import open_descriptors

PAGE_BYTES = PROGRESS_SLOTS * 64


@pytest.fixture
def page() -> Iterator[ProgressPage]:
    made = ProgressPage.make("kvcached-test")
    yield made
    made.close()


def entry(page: ProgressPage, index: int) -> tuple[int, int, int]:
    """Transfer, layers done and state, read as the description says."""
    content = os.pread(page.descriptor, 64, index * 64)
    assert content[16:] == bytes(48)
    return (
        int.from_bytes(content[:8], "little"),
        int.from_bytes(content[8:12], "little"),
        int.from_bytes(content[12:16], "little"),
    )


def events_told(page: ProgressPage, index: int) -> int:
    """How often an entry's event was written since the last look."""
    try:
        return os.eventfd_read(page.events[index])
    except BlockingIOError:
        return 0


def test_load_tells_each_layer_and_its_end(page: ProgressPage) -> None:
    """A load counts its layers one by one and ends as done, with an event for each of these and none for the others."""
    page.begin(3, 70)
    assert (entry(page, 3), events_told(page, 3)) == ((70, 0, STATE_RUNNING), 0)
    page.advance(3)
    page.advance(3)
    assert (entry(page, 3), events_told(page, 3)) == ((70, 2, STATE_RUNNING), 2)
    page.succeed(3)
    assert (entry(page, 3), events_told(page, 3)) == ((70, 2, STATE_DONE), 1)

    others = [index for index in range(PROGRESS_SLOTS) if index != 3]
    assert all(entry(page, index) == (0, 0, 0) and not events_told(page, index) for index in others)


@pytest.mark.parametrize("begun", [False, True])
def test_failed_load_says_so(page: ProgressPage, begun: bool) -> None:
    """A load ends as failed, also where it never began, and nothing of the entry's load before it is left."""
    page.begin(0, 70)
    page.advance(0)
    page.succeed(0)
    if begun:
        page.begin(0, 71)
    events_told(page, 0)

    page.fail(0, 71)

    assert (entry(page, 0), events_told(page, 0)) == ((71, 0, STATE_FAILED), 1)


def test_new_load_never_shows_the_state_of_the_one_before(page: ProgressPage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sees the new transfer sees neither layers nor the end of the old one, however few writes were made."""
    seen = []

    class Watched:
        """Looks at the entry after each write."""

        def __init__(self, words: memoryview) -> None:
            self.words = words

        def __getitem__(self, index: int) -> int:
            return int(self.words[index])

        def __setitem__(self, index: int, value: int) -> None:
            self.words[index] = value
            seen.append(entry(page, 2))

    for begin in (page.begin, page.fail):
        page.begin(2, 70)
        page.advance(2)
        page.succeed(2)
        with monkeypatch.context() as patch:
            patch.setattr(page, "_short", Watched(page._short))
            patch.setattr(page, "_long", Watched(page._long))
            begin(2, 71)

    assert len(seen) >= 6
    assert all(layers == 0 and state != STATE_DONE for transfer, layers, state in seen if transfer == 71)
    assert all(state != STATE_FAILED for transfer, _, state in seen if transfer == 70)


def test_load_that_takes_an_entry_wakes_who_waits_for_the_one_before(page: ProgressPage) -> None:
    """Whoever looked while the entry changed hands looks again, and sees that the earlier load is over."""
    page.begin(3, 70)
    page.succeed(3)
    assert events_told(page, 3) == 1
    page.begin(3, 71)
    assert events_told(page, 3) == 1


def test_page_cannot_be_written_or_resized_by_a_holder(page: ProgressPage) -> None:
    """Whoever has the descriptor can map the page readable, and can neither map it writable nor resize it."""
    with mmap.mmap(page.descriptor, PAGE_BYTES, prot=mmap.PROT_READ) as mapping:
        assert len(mapping) == PAGE_BYTES
    with pytest.raises(PermissionError):
        mmap.mmap(page.descriptor, PAGE_BYTES)
    for size_bytes in (0, 2 * PAGE_BYTES):
        with pytest.raises(OSError, match="Invalid argument"):  # it can only be read
            os.ftruncate(page.descriptor, size_bytes)
        with pytest.raises(OSError, match="not permitted") as caught:
            os.ftruncate(page.writable[0], size_bytes)
        assert caught.value.errno == errno.EPERM


def test_page_is_its_owners_alone(page: ProgressPage) -> None:
    """Another user's process cannot open its descriptor again to write, for the page's mode is that of its owner."""
    assert all(stat.S_IMODE(os.fstat(each).st_mode) == 0o600 for each in (page.descriptor, page.writable[0]))


def test_page_survives_an_event_that_a_reader_filled(page: ProgressPage) -> None:
    """An event whose count a reader drove to its limit neither blocks the worker nor fails the load."""
    os.eventfd_write(page.events[5], (1 << 64) - 2)

    page.begin(5, 70)
    page.advance(5)
    page.succeed(5)

    assert entry(page, 5) == (70, 1, STATE_DONE)


def test_page_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing a page twice, and a page that could not be made, leave no descriptor open."""
    before = open_descriptors()
    page = ProgressPage.make("kvcached-test")
    assert len(page.descriptors) == 1 + PROGRESS_SLOTS
    assert not any(os.get_inheritable(descriptor) for descriptor in page.descriptors)
    page.close()
    page.close()
    assert open_descriptors() == before

    monkeypatch.setattr(os, "eventfd", None)
    with pytest.raises(TypeError):
        ProgressPage.make("kvcached-test")
    assert open_descriptors() == before


READER = """
import mmap, os, select, sys
page, event = int(sys.argv[1]), int(sys.argv[2])
memory = mmap.mmap(page, 2048, prot=mmap.PROT_READ)
poll = select.poll()
poll.register(event, select.POLLIN)
while True:
    poll.poll()
    os.eventfd_read(event)
    parts = memory[384:392], memory[392:396], memory[396:400]
    print(*(int.from_bytes(part, "little") for part in parts), flush=True)
"""


def test_another_process_sees_each_layer_after_its_event(page: ProgressPage) -> None:
    """A process that has only the descriptors is woken once per change, and then reads that change, in order."""
    descriptors = (page.descriptor, page.events[6])
    arguments = [sys.executable, "-c", READER, *(str(descriptor) for descriptor in descriptors)]
    seen = []
    with subprocess.Popen(arguments, pass_fds=descriptors, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None

        def told() -> None:
            assert reader.stdout is not None
            assert select.select([reader.stdout], [], [], 20)[0]
            seen.append(tuple(int(part) for part in reader.stdout.readline().split()))

        page.begin(6, 70)
        for _ in range(3):
            page.advance(6)
            told()
        page.succeed(6)
        told()
        page.fail(6, 71)
        told()
        reader.kill()

    assert seen == [
        (70, 1, STATE_RUNNING),
        (70, 2, STATE_RUNNING),
        (70, 3, STATE_RUNNING),
        (70, 3, STATE_DONE),
        (71, 0, STATE_FAILED),
    ]
