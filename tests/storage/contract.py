"""What every backend has to do. A subclass names the backend; pytest then runs all of this against it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcached.storage.backend import ABSENT, DONE, SHARED_RECORD_BYTES_MAX, Outcome, Storage, VersionedRecord
from tests.storage.values import TIMEOUT_S, asked, is_right, key, kind, proves_itself, stored

OTHER = kind(generation=8)


def put(storage: Storage, *numbers: int) -> None:
    """Store blocks of the usual kind."""
    assert storage.put([stored(each) for each in numbers], timeout_s=TIMEOUT_S) == [DONE] * len(numbers)


def exists(storage: Storage, *numbers: int) -> list[bool]:
    """Ask for blocks of the usual kind."""
    return storage.exists([key(each) for each in numbers], timeout_s=TIMEOUT_S)


class StorageContract:
    """Of one backend."""

    #: Whether the backend keeps values when it is closed and opened again.
    is_persistent = True

    def open(self, directory: Path) -> Storage:
        """A backend in an empty directory, or one in which it was before."""
        raise NotImplementedError

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Iterator[Storage]:
        """An open backend, empty at first."""
        storage = self.open(tmp_path / "storage")
        yield storage
        storage.close()

    def test_what_was_put_can_be_got(self, storage: Storage) -> None:
        """A value comes back byte for byte, into other memory."""
        put(storage, 1, 2)
        blocks = [asked(2), asked(1)]

        results = storage.get(blocks, timeout_s=TIMEOUT_S)

        assert results == [DONE, DONE]
        assert is_right(blocks[0], 2)
        assert is_right(blocks[1], 1)

    def test_absent_blocks_spoil_no_batch(self, storage: Storage) -> None:
        """In a batch each block has a result of its own, in order."""
        put(storage, 1, 3)
        blocks = [asked(number) for number in range(5)]

        results = storage.get(blocks, timeout_s=TIMEOUT_S)

        assert [each.outcome for each in results] == [(ABSENT, DONE)[number in {1, 3}].outcome for number in range(5)]
        assert is_right(blocks[3], 3)

    def test_exists_tells_what_there_is(self, storage: Storage) -> None:
        """Keys are there after they were put, and not before."""
        assert exists(storage, 1, 2) == [False, False]

        put(storage, 2)

        assert exists(storage, 1, 2) == [False, True]

    def test_empty_batches_do_nothing(self, storage: Storage) -> None:
        """No keys, no results."""
        assert storage.exists([], timeout_s=TIMEOUT_S) == []
        assert storage.get([], timeout_s=TIMEOUT_S) == []
        assert storage.put([], timeout_s=TIMEOUT_S) == []
        assert storage.delete([], timeout_s=TIMEOUT_S) == 0

    def test_a_key_may_be_put_again(self, storage: Storage) -> None:
        """A value that is there already, or twice in one batch, is as good as a new one."""
        put(storage, 1)
        put(storage, 1, 2, 2)
        block = asked(2)

        assert storage.get([block], timeout_s=TIMEOUT_S) == [DONE]
        assert is_right(block, 2)

    def test_value_of_another_size_is_replaced(self, storage: Storage) -> None:
        """A value is got in its own size or not at all; one of another size is discarded, and put again."""
        short = stored(1)
        assert storage.put([short._replace(parts=short.parts[:2])], timeout_s=TIMEOUT_S) == [DONE]

        (result,) = storage.get([asked(1)], timeout_s=TIMEOUT_S)

        assert result.outcome in {Outcome.ABSENT, Outcome.WRONG}
        if result.outcome is Outcome.WRONG:
            storage.discard([key(1)], timeout_s=TIMEOUT_S)
        assert storage.missing([key(1)], timeout_s=TIMEOUT_S) == [True]
        put(storage, 1)
        block = asked(1)
        assert storage.get([block], timeout_s=TIMEOUT_S) == [DONE]
        assert is_right(block, 1)

    @pytest.mark.parametrize(("part_bytes", "shards"), [(1, 1), (4096, 1), (5000, 3), (512, 64), (1 << 20, 2)])
    def test_values_have_any_size(self, storage: Storage, part_bytes: int, shards: int) -> None:
        """Parts need not be whole pages, and there may be one for each of 64 shards."""
        of = kind(part_bytes, shards)
        block = asked(1, of)

        assert storage.put([stored(1, of)], timeout_s=TIMEOUT_S) == [DONE]
        assert storage.get([block], timeout_s=TIMEOUT_S) == [DONE]

        assert is_right(block, 1, of)

    def test_deleted_values_are_absent(self, storage: Storage) -> None:
        """What is deleted is gone, the rest is not, and the number of values that there were is told."""
        put(storage, 1, 2, 3)

        assert storage.delete([key(1), key(3), key(9)], timeout_s=TIMEOUT_S) == 2

        assert exists(storage, 1, 2, 3) == [False, True, False]
        assert [each.outcome for each in storage.get([asked(1)], timeout_s=TIMEOUT_S)] == [Outcome.ABSENT]

    def test_deleted_values_can_be_put_again(self, storage: Storage) -> None:
        """A key is free after it was deleted."""
        put(storage, 1)
        storage.delete([key(1)], timeout_s=TIMEOUT_S)
        put(storage, 1)
        block = asked(1)

        assert storage.get([block], timeout_s=TIMEOUT_S) == [DONE]
        assert is_right(block, 1)

    def test_one_namespace_is_cleared(self, storage: Storage) -> None:
        """Clearing a prefix forgets all its values and no others."""
        put(storage, 1, 2)
        storage.put([stored(1, OTHER)], timeout_s=TIMEOUT_S)

        assert storage.clear(OTHER.prefix(), timeout_s=TIMEOUT_S) == 1

        assert exists(storage, 1, 2) == [True, True]
        assert storage.exists([key(1, OTHER)], timeout_s=TIMEOUT_S) == [False]

    def test_everything_is_cleared(self, storage: Storage) -> None:
        """Clearing without a prefix forgets all values, and the backend goes on."""
        put(storage, 1, 2)

        assert storage.clear(b"", timeout_s=TIMEOUT_S) == 2

        assert exists(storage, 1, 2) == [False, False]
        put(storage, 1)
        assert exists(storage, 1) == [True]

    def test_usage_counts(self, storage: Storage) -> None:
        """How full it is follows what is put and deleted, where it is known."""
        put(storage, 1, 2, 3)
        storage.delete([key(1)], timeout_s=TIMEOUT_S)

        usage = storage.usage()

        assert usage.blocks in {2, -1}
        assert usage.size_bytes >= 2 * stored(1).size_bytes or usage.size_bytes == -1

    def test_values_outlive_the_process(self, tmp_path: Path) -> None:
        """What was put is there when the backend is opened again."""
        if not self.is_persistent:
            pytest.skip("keeps nothing")
        first = self.open(tmp_path / "again")
        put(first, 1, 2)
        first.close()
        second = self.open(tmp_path / "again")
        block = asked(1)

        assert second.get([block], timeout_s=TIMEOUT_S) == [DONE]
        assert is_right(block, 1)
        second.close()

    def test_calls_come_from_several_threads(self, storage: Storage) -> None:
        """Threads that put, get and delete the same keys find whole values or none."""
        mistakes: list[str] = []

        def work(seed: int) -> None:
            for turn in range(30):
                number = (seed + turn * 3) % 5
                storage.put([stored(number)], timeout_s=TIMEOUT_S)
                block = asked(number)
                (result,) = storage.get([block], timeout_s=TIMEOUT_S)
                if result.outcome not in {Outcome.DONE, Outcome.ABSENT}:
                    mistakes.append(str(result))
                if result.outcome is Outcome.DONE and not proves_itself(block, number):
                    mistakes.append(f"block {number} is another one")
                storage.delete([key((seed + turn) % 5)], timeout_s=TIMEOUT_S)

        run_in_threads(work, storage.capabilities.threads)

        assert mistakes == []


class SharedContract(StorageContract):
    """Of one backend that daemons of several machines share. `open` opens the same service for the same directory."""

    def test_there_is_no_record_at_first(self, storage: Storage) -> None:
        """A service that nobody has used has no record, and does not count one as a block."""
        assert storage.capabilities.is_shared
        assert storage.read_record(timeout_s=TIMEOUT_S) is None
        assert storage.usage().blocks in {0, -1}

    def test_a_record_is_replaced_by_who_knows_it(self, storage: Storage) -> None:
        """A record is written after the version that is there, and not after an earlier one, or after none."""
        first = storage.write_record(b"first", b"", timeout_s=TIMEOUT_S)

        assert first
        assert storage.write_record(b"also first", b"", timeout_s=TIMEOUT_S) is None
        assert storage.read_record(timeout_s=TIMEOUT_S) == VersionedRecord(b"first", first)

        second = storage.write_record(b"second", first, timeout_s=TIMEOUT_S)

        assert second
        assert second != first
        assert storage.write_record(b"also second", first, timeout_s=TIMEOUT_S) is None
        assert storage.read_record(timeout_s=TIMEOUT_S) == VersionedRecord(b"second", second)

    def test_a_record_of_the_same_bytes_is_another_version(self, storage: Storage) -> None:
        """Who writes the bytes that are there already makes a version, so a daemon sees that another one wrote."""
        first = storage.write_record(b"same", b"", timeout_s=TIMEOUT_S)
        assert first
        second = storage.write_record(b"same", first, timeout_s=TIMEOUT_S)
        assert second

        assert storage.write_record(b"other", first, timeout_s=TIMEOUT_S) is None

    def test_a_record_that_is_gone_is_not_replaced(self, storage: Storage) -> None:
        """A version that was never there is not taken for that of a record that is lost."""
        assert storage.write_record(b"second", b"0" * 16, timeout_s=TIMEOUT_S) is None
        assert storage.read_record(timeout_s=TIMEOUT_S) is None

    def test_one_of_several_writers_wins(self, storage: Storage, tmp_path: Path) -> None:
        """Of daemons that write after the same version, one does, round after round."""
        writers = [self.open(tmp_path / "storage") for _ in range(4)]
        version = b""
        for turn in range(5):
            won: dict[int, bytes] = {}

            def write(number: int, turn: int = turn, version: bytes = version, won: dict[int, bytes] = won) -> None:
                data = b"%d %d" % (turn, number)
                written = writers[number].write_record(data, version, timeout_s=TIMEOUT_S)
                if written is not None:
                    won[number] = written

            run_in_threads(write, len(writers))

            ((winner, version),) = won.items()
            record = VersionedRecord(b"%d %d" % (turn, winner), version)
            assert storage.read_record(timeout_s=TIMEOUT_S) == record
        for writer in writers:
            writer.close()

    def test_a_record_is_no_value(self, storage: Storage) -> None:
        """The record stays when all values are cleared, which do not count it."""
        version = storage.write_record(b"a record", b"", timeout_s=TIMEOUT_S)
        assert version
        put(storage, 1)

        assert storage.clear(b"", timeout_s=TIMEOUT_S) == 1

        assert storage.read_record(timeout_s=TIMEOUT_S) == VersionedRecord(b"a record", version)

    def test_the_largest_record_is_kept(self, storage: Storage) -> None:
        """A record of the largest size, of any bytes, comes back as it was."""
        data = bytes(range(256)) * (SHARED_RECORD_BYTES_MAX // 256)
        version = storage.write_record(data, b"", timeout_s=TIMEOUT_S)
        assert version

        assert storage.read_record(timeout_s=TIMEOUT_S) == VersionedRecord(data, version)

    def test_blocks_are_found_by_others(self, storage: Storage, tmp_path: Path) -> None:
        """What one daemon has put, another one gets."""
        other = self.open(tmp_path / "storage")
        put(storage, 1)
        block = asked(1)

        assert other.get([block], timeout_s=TIMEOUT_S) == [DONE]
        assert is_right(block, 1)
        other.close()


def run_in_threads(work: Callable[[int], None], count: int) -> None:
    """Run it with 0 … count - 1 at the same time, and wait for all."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
