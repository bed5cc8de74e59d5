from __future__ import annotations

import io
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from kvcached.storage.backend import DONE, Outcome, Storage
from kvcached.storage.disk.backend import DiskStorage
from kvcached.storage.disk.index import IndexDamaged
from tests.project.source_tree import ROOT
from tests.storage.disks import flip, get, opened, put, restore, there
from tests.storage.putter import NUMBERS
from tests.storage.values import TIMEOUT_S, asked, is_right, key, proves_itself, stored

BLOCKS = range(60)
Answer = TypeVar("Answer")


def kill_while_putting(directory: Path, seed: int, batches: int) -> None:
    """Let a process store blocks, and kill it after so many batches."""
    command = [sys.executable, "-m", "tests.storage.putter", str(directory), str(seed)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        for _ in range(batches):
            assert child.stdout.readline()
        child.kill()


@pytest.mark.parametrize("kills", [2, pytest.param(40, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_killed_process_leaves_no_wrong_bytes(tmp_path: Path, kills: int) -> None:
    """After a SIGKILL at any moment the directory opens at once, and each block is right or absent."""
    draw = random.Random(kills)
    for seed in range(kills):
        kill_while_putting(tmp_path / "d", seed, draw.randrange(1, 60))
        with opened(tmp_path / "d") as storage:
            outcomes = [get(storage, number).outcome for number in range(NUMBERS)]

            assert set(outcomes) <= {Outcome.DONE, Outcome.ABSENT}
            assert outcomes.count(Outcome.DONE) >= storage.usage().blocks * 0.9


def test_directory_without_its_index_starts_empty(tmp_path: Path) -> None:
    """When the index is gone no block is found, none of the old files is left, and all of the capacity can be used."""
    with opened(tmp_path / "d") as storage:
        put(storage, *BLOCKS)
        capacity = fill(storage)
    (tmp_path / "d" / "index.db").unlink()

    with opened(tmp_path / "d") as storage:
        assert storage.usage().blocks == 0
        assert there(storage, BLOCKS) == set()
        assert list((tmp_path / "d").glob("*.slots")) == []
        assert fill(storage) == capacity


def fill(storage: DiskStorage) -> int:
    """Put more than fits; how many blocks it holds then."""
    for first in range(1000, 1300, 20):
        assert put(storage, *range(first, first + 20)) == [Outcome.DONE] * 20
    blocks = storage.usage().blocks
    assert len(there(storage, range(1000, 1300))) == blocks
    return blocks


def test_index_of_another_format_starts_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that another program or version wrote in the index's place is replaced."""
    with opened(tmp_path / "d") as storage:
        put(storage, *BLOCKS)
    (tmp_path / "d" / "index.db").write_bytes(b"another database" * 4096)

    with opened(tmp_path / "d") as storage:
        assert there(storage, BLOCKS) == set()
        assert put(storage, 1) == [Outcome.DONE]
    assert "all blocks are forgotten" in caplog.text


def test_deleted_blocks_stay_away_after_a_kill(tmp_path: Path) -> None:
    """What was deleted or cleared before a SIGKILL is not there afterwards."""
    program = (
        "import os, signal, sys; from pathlib import Path; from tests.storage.disks import opened, put;"
        "from tests.storage.values import key\n"
        "with opened(Path(sys.argv[1])) as storage:\n"
        f"    put(storage, *range({len(BLOCKS)}))\n"
        f"    storage.delete([key(number) for number in range(0, {len(BLOCKS)}, 2)], timeout_s=1)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "d")], cwd=ROOT, check=False)

    with opened(tmp_path / "d") as storage:
        assert there(storage, BLOCKS) == {number for number in BLOCKS if number % 2}


def test_deleted_blocks_stay_away_after_a_loss_of_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was deleted is not there in the index as it was synced last; wrong blocks are deleted without a sync."""
    synced: list[int] = []

    def fsync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        shutil.copytree(tmp_path / "d", tmp_path / f"synced {len(synced)}")

    with opened(tmp_path / "d") as storage:
        put(storage, *BLOCKS)
        monkeypatch.setattr(os, "fsync", fsync)
        storage.discard([key(0)], timeout_s=1)
        assert synced == []
        storage.delete([key(1), key(2)], timeout_s=1)
        storage.delete([key(1)], timeout_s=1)  # again, as after a sync that failed
        monkeypatch.undo()
        assert synced == [(tmp_path / "d" / "index.db-wal").stat().st_ino] * 2

    with opened(tmp_path / "synced 1") as storage:
        assert there(storage, BLOCKS) == set(BLOCKS) - {0, 1, 2}


def test_index_of_an_earlier_time_leads_to_no_wrong_bytes(tmp_path: Path) -> None:
    """After a loss of power the index may be older than the slots: blocks are right or prove nothing."""
    with opened(tmp_path / "d") as storage:
        put(storage, *range(200))
    old = (tmp_path / "d" / "index.db").read_bytes()
    with opened(tmp_path / "d") as storage:
        before = storage.usage().blocks
        put(storage, *range(1000, 1000 + before // 2))
        capacity = fill(storage)
    (tmp_path / "d" / "index.db").write_bytes(old)

    with opened(tmp_path / "d") as storage:
        blocks = [asked(number) for number in range(200)]
        results = storage.get(blocks, timeout_s=TIMEOUT_S)
        for number, (block, result) in enumerate(zip(blocks, results, strict=True)):
            assert result != DONE or is_right(block, number) or not proves_itself(block, number)
        assert storage.usage().blocks == before
        assert fill(storage) == capacity


def test_slots_that_the_index_does_not_know_are_free(tmp_path: Path) -> None:
    """After a crash in which the last entries were lost their slots take other blocks: none is lost for ever."""
    with opened(tmp_path / "d") as storage:
        put(storage, *range(10))
    old = (tmp_path / "d" / "index.db").read_bytes()
    with opened(tmp_path / "d") as storage:
        put(storage, *range(10, 100))
        capacity = storage.usage().blocks
    (tmp_path / "d" / "index.db").write_bytes(old)

    with opened(tmp_path / "d") as storage:
        assert storage.usage().blocks == 10
        assert there(storage, range(100)) == set(range(10))
        assert put(storage, *range(1000, 1000 + capacity)) == [Outcome.DONE] * capacity
        assert len(there(storage, range(1000, 1000 + capacity))) == capacity


def test_entries_of_a_file_that_is_gone_are_removed(tmp_path: Path) -> None:
    """After a loss of power a file may be gone whose entries are there: they are removed, and no new file gets them."""
    with opened(tmp_path / "d") as storage:
        put(storage, *range(200))
        found = there(storage, range(200))
    gone = max((tmp_path / "d").glob("*.slots"))
    gone.unlink()

    with opened(tmp_path / "d") as storage:
        left = there(storage, range(200))
        assert left < found
        assert storage.usage().blocks == len(left)
        assert storage._catalog._index.count() == len(left)
        assert all(get(storage, number) == DONE for number in left)
        fill(storage)


@pytest.mark.parametrize("column", ["key", "size", "stored", "used", "slot_bytes"])
@pytest.mark.parametrize("value", ["'text'", "1.5e300", str((1 << 63) - 1), "-1"])
def test_damaged_values_of_an_index_are_no_hindrance(tmp_path: Path, column: str, value: str) -> None:
    """Whatever stands in an entry, the directory opens, blocks are right or absent, and every slot can be used."""
    with opened(tmp_path / "d") as storage:
        put(storage, *BLOCKS)
        capacity = fill(storage)
        storage.clear(b"", timeout_s=TIMEOUT_S)
        put(storage, *BLOCKS)
    with closing(sqlite3.connect(tmp_path / "d" / "index.db")) as database, database:
        database.execute(f"UPDATE block SET {column} = {value} WHERE key = (SELECT min(key) FROM block)")  # noqa: S608 - ours

    with opened(tmp_path / "d") as storage:
        for number in BLOCKS:
            twice(storage, partial(get, storage, number))
        assert twice(storage, lambda: put(storage, *BLOCKS)) == [Outcome.DONE] * len(BLOCKS)
        assert twice(storage, lambda: fill(storage)) >= capacity - 1


@pytest.mark.parametrize("place", [-1, (1 << 63) - 1, 1 << 62, (1 << 32) | 5000, 7 << 32])
def test_damaged_places_of_an_index_are_no_hindrance(tmp_path: Path, place: int) -> None:
    """An entry that leads nowhere is removed when the directory is opened; all others are there."""
    with opened(tmp_path / "d") as storage:
        put(storage, *BLOCKS)
    with closing(sqlite3.connect(tmp_path / "d" / "index.db")) as database, database:
        database.execute("UPDATE block SET place = ? WHERE key = (SELECT min(key) FROM block)", (place,))

    with opened(tmp_path / "d") as storage:
        assert sum(get(storage, number) == DONE for number in BLOCKS) == len(BLOCKS) - 1
        assert storage.usage().blocks == len(BLOCKS) - 1
        assert put(storage, *BLOCKS) == [Outcome.DONE] * len(BLOCKS)


@pytest.mark.parametrize("trials", [10, pytest.param(400, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_damaged_index_leads_to_no_wrong_bytes(tmp_path: Path, trials: int) -> None:
    """Wherever the index is cut or changed, blocks are right or prove nothing, and all can be stored again."""
    draw, index = random.Random(trials), tmp_path / "d" / "index.db"
    with opened(tmp_path / "d") as storage:
        put(storage, *BLOCKS)
    before = contents(tmp_path / "d")
    whole = before["index.db"]
    for trial in range(trials):
        for name, content in before.items():
            (tmp_path / "d" / name).write_bytes(content)
        if trial % 2:
            index.write_bytes(whole[: draw.randrange(len(whole))])
        else:
            for _ in range(draw.choice([1, 10, 1000])):
                flip(index, draw)
        with opened(tmp_path / "d") as storage:
            blocks = [asked(number) for number in BLOCKS]
            results = twice(storage, partial(storage.get, blocks, timeout_s=TIMEOUT_S))
            for number, (block, result) in enumerate(zip(blocks, results, strict=True)):
                assert result != DONE or is_right(block, number) or not proves_itself(block, number)

        with opened(tmp_path / "d") as storage:
            assert twice(storage, lambda: put(storage, *range(100, 160))) == [Outcome.DONE] * 60
            assert twice(storage, lambda: there(storage, range(100, 160))) == set(range(100, 160))
            assert twice(storage, lambda: put(storage, *range(100, 160))) == [Outcome.DONE] * 60


def twice(storage: DiskStorage, call: Callable[[], Answer]) -> Answer:
    """Call again if the call has come across damage: then there is an empty index."""
    try:
        return call()
    except IndexDamaged:
        return call()


def test_index_that_is_damaged_while_open_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The call that comes across the damage fails; the next one finds nothing, and can store."""
    with opened(tmp_path / "d") as storage:
        put(storage, *BLOCKS)
        storage._catalog._index._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        storage._catalog._index._database.execute("PRAGMA cache_size = 0")
        storage._catalog._index._database.execute("PRAGMA shrink_memory")
        index = tmp_path / "d" / "index.db"
        with index.open("r+b") as file:
            file.seek(4096)
            file.write(b"\xff" * (index.stat().st_size - 4096))

        with pytest.raises(IndexDamaged):
            storage.get([asked(number) for number in BLOCKS], timeout_s=TIMEOUT_S)

        assert there(storage, BLOCKS) == set()
        assert put(storage, *BLOCKS) == [Outcome.DONE] * len(BLOCKS)
        assert all(get(storage, number) == DONE for number in BLOCKS)
    assert "all blocks are forgotten" in caplog.text


def test_writer_that_was_under_way_when_the_index_was_replaced_stores_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot that was taken before everything began empty belongs to nobody: its block is FULL, others are stored."""
    write = os.pwritev
    with opened(tmp_path / "d") as storage:

        def write_late(descriptor: int, parts: list[memoryview], offset: int) -> int:
            monkeypatch.setattr(os, "pwritev", write)
            with storage._lock:
                storage._catalog.replace_index(IndexDamaged("injected"))
            put(storage, 2)
            return write(descriptor, parts, offset)

        monkeypatch.setattr(os, "pwritev", write_late)

        assert put(storage, 1) == [Outcome.FULL]
        assert there(storage, range(5)) == {2}
        assert get(storage, 2) == DONE


@pytest.mark.parametrize("trials", [1000, pytest.param(40_960, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_changed_byte_of_a_value_is_never_served(tmp_path: Path, trials: int) -> None:
    """Whichever byte of a slot changes, and each of them does, the frame tells."""
    draw, served = random.Random(1), 0
    parts = {number: [bytes(part) for part in stored(number).parts[1:]] for number in (1, 2)}
    with opened(tmp_path / "d", capacity_bytes=8 << 20) as storage:
        put(storage, 1, 2)
        (slots,) = (tmp_path / "d").glob("*.slots")
        for trial in range(trials):
            at = trial * 4099 % 40960  # each byte once in 40960 trials, in no order
            where = flip(slots, draw, at)
            number = 1 + at // 20480
            block = asked(number)
            (result,) = storage.get([block], timeout_s=TIMEOUT_S)
            if result == DONE and proves_itself(block, number):
                served += [bytes(part) for part in block.parts[1:]] != parts[number]
            restore(slots, *where)

    assert served == 0


@pytest.mark.parametrize("trials", [500, pytest.param(40_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_torn_value_is_never_served(tmp_path: Path, trials: int) -> None:
    """Wherever a value ends early, in zeros, in what was there before or with its file, it is the right one or none."""
    draw, served = random.Random(5), 0
    parts = {number: [bytes(part) for part in stored(number).parts[1:]] for number in (1, 2)}
    with opened(tmp_path / "d") as storage:
        put(storage, 1, 2)
        (path,) = (tmp_path / "d").glob("*.slots")
        with path.open("r+b", buffering=0) as slots:
            whole = slots.read()
            values = {1: whole[:20480], 2: whole[20480:40960]}
            for _ in range(trials):
                number, at = draw.choice([1, 2]), draw.randrange(20480)
                tear(slots, (number - 1) * 20480, at, draw.choice([bytes(20480), values[3 - number], b""]))
                block = asked(number)
                (result,) = storage.get([block], timeout_s=TIMEOUT_S)
                if result == DONE and proves_itself(block, number):
                    served += [bytes(part) for part in block.parts[1:]] != parts[number]
                os.pwrite(slots.fileno(), whole, 0)
                put(storage, number)

    assert served == 0


def tear(file: io.FileIO, start: int, at: int, rest: bytes) -> None:
    """A value that begins at `start` ends `at` bytes later: as `rest` does, or with the file where that is nothing."""
    if rest:
        os.pwrite(file.fileno(), rest[at:], start + at)
    else:
        os.ftruncate(file.fileno(), start + at)


@pytest.mark.parametrize("trials", [4, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_loss_of_power_leaves_no_wrong_bytes(tmp_path: Path, trials: int) -> None:
    """Of what was written lately any pages have reached the disk: blocks are right or absent, and no slot is lost."""
    draw = random.Random(trials)
    with opened(tmp_path / "d") as storage:
        put(storage, *range(200))
        capacity = storage.usage().blocks
    for trial in range(trials):
        with opened(tmp_path / "d") as storage:
            before = contents(tmp_path / "d")
            for _ in range(draw.randrange(1, 30)):
                put(storage, *(draw.randrange(200) for _ in range(4)))
                storage.delete([key(draw.randrange(200))], timeout_s=TIMEOUT_S)
            after = contents(tmp_path / "d")
        lose_power(tmp_path / str(trial), before, after, draw)

        with opened(tmp_path / str(trial)) as storage:
            blocks = [asked(number) for number in range(200)]
            results = twice(storage, partial(storage.get, blocks, timeout_s=TIMEOUT_S))
            for number, (block, result) in enumerate(zip(blocks, results, strict=True)):
                assert result != DONE or is_right(block, number) or not proves_itself(block, number)
            twice(storage, lambda: put(storage, *range(1000, 1000 + capacity)))
            assert twice(storage, lambda: put(storage, *range(2000, 2000 + capacity))) == [Outcome.DONE] * capacity
            assert len(there(storage, range(2000, 2000 + capacity))) == capacity


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def lose_power(directory: Path, before: dict[str, bytes], after: dict[str, bytes], draw: random.Random) -> None:
    """A directory in which each page of each file is as it was before, or as it would have become."""
    directory.mkdir(mode=0o700)
    share = draw.random()
    for name in before.keys() | after.keys():
        old, new = before.get(name, b""), after.get(name, b"")
        size = len(draw.choice([old, new]))
        pages = ((new if draw.random() < share else old)[at : at + 4096] for at in range(0, size, 4096))
        (directory / name).write_bytes(b"".join(page.ljust(4096, b"\0") for page in pages)[:size])


@pytest.mark.parametrize("first", [0, 4096, 12288])
def test_value_that_never_reached_the_disk_proves_nothing(tmp_path: Path, first: int) -> None:
    """The entry is there and bytes of the value are not, as after a loss of power: its frame tells."""
    with opened(tmp_path / "d") as storage:
        put(storage, 1)
    (slots,) = (tmp_path / "d").glob("*.slots")
    with slots.open("r+b") as file:
        file.seek(first)
        file.write(bytes(4096))

    with opened(tmp_path / "d") as storage:
        block = asked(1)
        assert storage.get([block], timeout_s=TIMEOUT_S) == [DONE]
        assert not proves_itself(block, 1)


@pytest.mark.parametrize("trials", [8, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_cut_files_lead_to_no_wrong_bytes(tmp_path: Path, trials: int) -> None:
    """Wherever a file of slots is cut, while it is open or before, each block is right or absent."""
    draw = random.Random(3)
    for trial in range(trials):
        with opened(tmp_path / "d") as storage:
            storage.clear(b"", timeout_s=TIMEOUT_S)
            put(storage, *BLOCKS)
            if trial % 2:
                cut(tmp_path / "d", draw)
                assert all_right_or_absent(storage)
        cut(tmp_path / "d", draw)

        with opened(tmp_path / "d") as storage:
            assert all_right_or_absent(storage)
            assert put(storage, *BLOCKS) == [Outcome.DONE] * len(BLOCKS)
            assert all_right_or_absent(storage)


def cut(directory: Path, draw: random.Random) -> None:
    path = draw.choice([*directory.glob("*.slots")])
    with path.open("r+b") as file:
        file.truncate(draw.randrange(path.stat().st_size + 1))


def all_right_or_absent(storage: Storage) -> bool:
    blocks = [asked(number) for number in BLOCKS]
    results = storage.get(blocks, timeout_s=TIMEOUT_S)
    return all(
        result.outcome is Outcome.ABSENT
        or (result == DONE and (is_right(block, number) or not proves_itself(block, number)))
        for block, number, result in zip(blocks, BLOCKS, results, strict=True)
    )
