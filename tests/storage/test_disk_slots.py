from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from kvcached.storage.backend import ABSENT, DONE, Block, Outcome
from kvcached.storage.disk.index import DiskIndex, Entry
from kvcached.storage.disk.slots import create_slot_file
from tests.storage.contract import run_in_threads
from tests.storage.disks import get, opened, put, there
from tests.storage.values import TIMEOUT_S, asked, is_right, key, kind, proves_itself, stored


def flags_of(monkeypatch: pytest.MonkeyPatch, name: str) -> list[bool]:
    """Whether each later call of that name goes past the page cache."""
    call, direct = getattr(os, name), []

    def note(descriptor: int, parts: list[memoryview], offset: int) -> int:
        direct.append(bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT))
        done = call(descriptor, parts, offset)
        assert isinstance(done, int)
        return done

    monkeypatch.setattr(os, name, note)
    return direct


def test_aligned_values_go_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frame and parts go to the device in one call each way, without the page cache, where the file system can."""
    with opened(tmp_path / "d") as storage:
        if not storage._catalog._space._direct:
            pytest.skip("the file system of temporary files has no O_DIRECT")
        writes, reads = flags_of(monkeypatch, "pwritev"), flags_of(monkeypatch, "preadv")

        put(storage, 1)
        assert get(storage, 1) == DONE

        assert (writes, reads) == ([True], [True])


def test_other_values_go_through_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of odd sizes, or in memory that is not aligned, are read and written all the same."""
    odd = kind(part_bytes=5000)
    writes, reads = flags_of(monkeypatch, "pwritev"), flags_of(monkeypatch, "preadv")
    with opened(tmp_path / "d") as storage:
        writes.clear()
        reads.clear()
        storage.put([stored(1, odd), stored(1)], timeout_s=TIMEOUT_S)
        block, shifted = asked(1, odd), asked(1)
        shifted = shifted._replace(parts=[memoryview(bytearray(4096 + 2 * 8192 + 1))[1:]])

        assert storage.get([block, shifted], timeout_s=TIMEOUT_S) == [DONE, DONE]

        assert is_right(block, 1, odd)
        assert bytes(shifted.parts[0]) == b"".join(stored(1).parts)
    assert writes[0] is False
    assert (reads[0], reads[-1]) == (False, False)


def test_directory_without_direct_io_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that refuses O_DIRECT, when files are opened or written, gets none."""
    call = os.pwritev

    def refuse(descriptor: int, parts: list[memoryview], offset: int) -> int:
        if os.fstat(descriptor).st_size == 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return call(descriptor, parts, offset)

    monkeypatch.setattr(os, "pwritev", refuse)
    with opened(tmp_path / "d") as storage:
        assert not storage._catalog._space._direct
        put(storage, 1)
        assert get(storage, 1) == DONE
    assert not (tmp_path / "d" / "probe").exists()


def test_short_reads_and_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that moves a part of a value is followed by others until all of it is moved."""
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: write(fd, [parts[0][:1000]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: read(fd, [parts[0][:3000]], at))
    with opened(tmp_path / "d", direct_io="off") as storage:
        put(storage, 1)

        assert get(storage, 1) == DONE


def test_memory_that_the_device_cannot_reach_is_bounced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where O_DIRECT refuses one value, that value goes through the page cache."""
    write, calls = os.pwritev, []

    def refuse_first(descriptor: int, parts: list[memoryview], offset: int) -> int:
        calls.append(descriptor)
        if len(calls) == 1:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(descriptor, parts, offset)

    with opened(tmp_path / "d") as storage:
        if not storage._catalog._space._direct:
            pytest.skip("the file system of temporary files has no O_DIRECT")
        monkeypatch.setattr(os, "pwritev", refuse_first)

        assert put(storage, 1) == [Outcome.DONE]
        assert get(storage, 1) == DONE
    assert len(set(calls)) == 2


def test_reader_never_gets_the_next_block_of_its_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that is given away while it is read: the reader finds its block absent."""
    read = os.preadv
    with opened(tmp_path / "d") as storage:
        put(storage, 1)

        def read_late(descriptor: int, parts: list[memoryview], offset: int) -> int:
            monkeypatch.setattr(os, "preadv", read)
            storage.delete([key(1)], timeout_s=TIMEOUT_S)
            put(storage, 2)
            return read(descriptor, parts, offset)

        monkeypatch.setattr(os, "preadv", read_late)
        block = asked(1)

        assert storage.get([block], timeout_s=TIMEOUT_S) == [ABSENT]

        assert [bytes(part) for part in block.parts] == [bytes(part) for part in stored(2).parts]
        assert get(storage, 2) == DONE


def test_reader_never_gets_a_block_of_a_file_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is given back while it is read: the reader finds its block absent."""
    read = os.preadv
    with opened(tmp_path / "d") as storage:
        put(storage, 1)

        def read_late(descriptor: int, parts: list[memoryview], offset: int) -> int:
            monkeypatch.setattr(os, "preadv", read)
            storage.clear(b"", timeout_s=TIMEOUT_S)
            return read(descriptor, parts, offset)

        monkeypatch.setattr(os, "preadv", read_late)

        assert get(storage, 1) == ABSENT


def test_writer_into_a_file_that_is_gone_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is given back while it is written: the put is FULL, and nothing is found later."""
    write = os.pwritev
    with opened(tmp_path / "d") as storage:

        def write_late(descriptor: int, parts: list[memoryview], offset: int) -> int:
            monkeypatch.setattr(os, "pwritev", write)
            storage.clear(b"", timeout_s=TIMEOUT_S)
            return write(descriptor, parts, offset)

        monkeypatch.setattr(os, "pwritev", write_late)

        assert put(storage, 1) == [Outcome.FULL]
        assert get(storage, 1) == ABSENT
        assert put(storage, 1) == [Outcome.DONE]


def test_threads_that_overwrite_each_other_find_no_wrong_bytes(tmp_path: Path) -> None:
    """While many blocks compete for few slots, whoever reads finds a right block or none."""
    wrong = []
    with opened(tmp_path / "d") as storage:

        def work(seed: int) -> None:
            for turn in range(100):
                number = (seed * 37 + turn * 7) % 200
                put(storage, number)
                block = asked((number + 3) % 200)
                (result,) = storage.get([block], timeout_s=TIMEOUT_S)
                if result == DONE and not proves_itself(block, (number + 3) % 200):
                    wrong.append(number)

        run_in_threads(work, 4)

    assert wrong == []


def test_slots_of_a_batch_that_fails_are_free_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the index takes one entry of a batch not, none of the batch is there, and each of its slots is free once."""
    add = DiskIndex.add

    def refuse(index: DiskIndex, entry: Entry, used_ns: int) -> bool:
        if entry.key == key(3):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return add(index, entry, used_ns)

    with opened(tmp_path / "d") as storage:
        with monkeypatch.context() as patch:
            patch.setattr(DiskIndex, "add", refuse)
            with pytest.raises(OSError, match="Input/output"):
                storage.put([stored(1), stored(1), stored(3)], timeout_s=TIMEOUT_S)

        (file,) = storage._catalog._space.files.values()
        assert sorted(file.free) == list(range(file.slots))
        assert there(storage, range(5)) == set()
        assert put(storage, 1, 3) == [Outcome.DONE] * 2


def test_slot_of_a_block_that_could_not_be_removed_is_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the index takes a removal back, the block is there still, and no other block gets its slot."""
    remove = DiskIndex.remove

    def fail(index: DiskIndex, entries: list[Entry]) -> list[Entry]:
        remove(index, entries)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with opened(tmp_path / "d") as storage:
        put(storage, 1)
        with monkeypatch.context() as patch:
            patch.setattr(DiskIndex, "remove", fail)
            with pytest.raises(OSError, match="Input/output"):
                storage.delete([key(1)], timeout_s=TIMEOUT_S)
        assert put(storage, 2) == [Outcome.DONE]

        assert get(storage, 1) == DONE
        assert get(storage, 2) == DONE


def test_slot_that_cannot_be_written_is_tried_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a write that failed the next block goes to another slot."""
    write, offsets = os.pwritev, []

    def note(descriptor: int, parts: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        if len(offsets) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(descriptor, parts, offset)

    with opened(tmp_path / "d") as storage:
        monkeypatch.setattr(os, "pwritev", note)

        assert put(storage, 1) == [Outcome.FAILED]
        assert put(storage, 2) == [Outcome.DONE]

    assert offsets[0] != offsets[1]


def descriptors() -> int:
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def test_files_are_closed_when_nobody_reads_any_more(tmp_path: Path) -> None:
    """A retired file gives its descriptors back with the last reference to it."""
    before = descriptors()
    file = create_slot_file(tmp_path, 1, 4096, 4, direct=False)
    file.retire()
    assert descriptors() > before

    del file

    assert descriptors() == before


def test_block_of_no_parts_is_stored(tmp_path: Path) -> None:
    """A value may be empty."""
    block = Block(bytes(32), [])
    with opened(tmp_path / "d") as storage:
        assert storage.put([block], timeout_s=TIMEOUT_S) == [DONE]
        assert storage.get([block], timeout_s=TIMEOUT_S) == [DONE]
