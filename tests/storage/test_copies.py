"""What the storage process does with orders: bytes, headers, and what it does not believe."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import xxhash

from kvcached.core.messages import Span
from kvcached.storage.backend import (
    ABSENT,
    DONE,
    WRONG,
    Block,
    Capabilities,
    Outcome,
    Result,
    Storage,
    Usage,
    no_progress,
)
from kvcached.storage.executor import HostCopies
from kvcached.storage.messages import Backup, BlockFormat, Delete, Fetch, Forget, Ping, Query, Request
from kvcached_client.blocks import header as host_header
from kvcached_client.blocks.header import BlockName, HeaderKind
from kvcached_client.blocks.host_layout import HEADER_BYTES, PAGE_BYTES, HostGeometry

SHARDS, BLOCK_BYTES = 2, 1000
GEOMETRY = HostGeometry(slabs=2, slab_bytes=SHARDS * 4 * PAGE_BYTES, shards=SHARDS, block_bytes=BLOCK_BYTES)
KIND = BlockFormat(
    namespace=b"n" * 16,
    header_namespace=b"h" * 16,
    header_generation=3,
    fingerprint=b"f" * 16,
    generation=2,
    geometry=GEOMETRY,
)
HEADERS = HeaderKind(KIND.header_namespace, KIND.fingerprint, KIND.header_generation)
KEYS = [bytes([number]) * 16 for number in range(1, 6)]


class Shelf(Storage):
    """A backend in this process's memory, whose contents a test may change."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytearray] = {}
        self.puts = 0
        self.failing: set[bytes] = set()

    def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        return [key in self.values for key in keys]

    def get(self, blocks: Sequence[Block], *, timeout_s: float) -> list[Result]:
        return [self._get(block) for block in blocks]

    def _get(self, block: Block) -> Result:
        value = self.values.get(block.key)
        if value is None:
            return ABSENT
        if len(value) != block.size_bytes:
            return WRONG
        at = 0
        for part in block.parts:
            part[:] = value[at : at + part.nbytes]
            at += part.nbytes
        return DONE

    def put(self, blocks: Sequence[Block], *, timeout_s: float) -> list[Result]:
        results = []
        for block in blocks:
            if block.key[16:] in self.failing:
                results.append(Result(Outcome.FAILED, "no"))
                continue
            self.values[block.key] = bytearray(b"".join(block.parts))
            self.puts += 1
            results.append(DONE)
        return results

    def delete(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        return sum(self.values.pop(key, None) is not None for key in keys)

    def clear(self, prefix: bytes, *, timeout_s: float, progress: Callable[[], None] = no_progress) -> int:
        progress()
        return self.delete([key for key in self.values if key.startswith(prefix)], timeout_s=timeout_s)

    def usage(self) -> Usage:
        return Usage(len(self.values), -1, -1)


class Rig:
    """A host pool, a shelf, and copies between the two."""

    def __init__(self, backend_for: Callable[[Shelf], Storage] = lambda shelf: shelf) -> None:
        self.memory = memoryview(mmap.mmap(-1, GEOMETRY.size_bytes))
        self.shelf = Shelf()
        self.copies = HostCopies(self.memory, backend_for(self.shelf), timeout_s=1.0)

    def part(self, slot: int, shard: int) -> memoryview:
        at = GEOMETRY.block_offset(slot, shard)
        return self.memory[at : at + BLOCK_BYTES]

    def header(self, slot: int, shard: int) -> memoryview:
        at = GEOMETRY.header_offset(slot, shard)
        return self.memory[at : at + HEADER_BYTES]

    def fill(self, slots: list[int]) -> None:
        """The chain of KEYS lies in these slots, as an engine has stored it."""
        for depth, slot in enumerate(slots):
            name = BlockName(KEYS[depth], KEYS[depth - 1] if depth else b"", depth)
            for shard in range(SHARDS):
                self.part(slot, shard)[:] = content(depth, shard)
                checksum = xxhash.xxh3_128_digest(content(depth, shard))
                host_header.write(self.header(slot, shard), host_header.pack(HEADERS, name, checksum, 1, 1))

    def holds(self, slot: int, depth: int) -> bool:
        """Whether a slot has a block of the chain, by its headers and its bytes."""
        name = BlockName(KEYS[depth], KEYS[depth - 1] if depth else b"", depth)
        return all(
            host_header.stored_checksum(self.header(slot, shard), HEADERS, name)
            == xxhash.xxh3_128_digest(content(depth, shard))
            and self.part(slot, shard) == content(depth, shard)
            for shard in range(SHARDS)
        )

    def back_up(self, slots: list[int]) -> tuple[int, int]:
        over = self.copies.carry_out(Backup(sequence=1, format=KIND, spans=(span(slots),)))
        return over.count, over.written

    def fetch(self, slots: list[int], keys: list[bytes] | None = None) -> tuple[int, int]:
        order = Fetch(sequence=2, format=KIND, span=span(slots, keys), epoch=9, transfer=8)
        over = self.copies.carry_out(order)
        return over.count, over.wrong


def content(depth: int, shard: int) -> bytes:
    return bytes([depth * 7 + shard + 1]) * BLOCK_BYTES


def span(slots: list[int], keys: list[bytes] | None = None) -> Span:
    pairs = array("i", [number for slot in slots for number in (slot, 1)])
    return Span(0, b"", b"".join((keys or KEYS)[: len(slots)]), pairs, array("i"))


@pytest.fixture
def rig() -> Rig:
    """Five blocks in scattered slots, and on the shelf."""
    made = Rig()
    made.fill([4, 0, 1, 3, 2])
    assert made.back_up([4, 0, 1, 3, 2]) == (5, 5)
    return made


def test_blocks_come_back_into_other_slots(rig: Rig) -> None:
    """What was written is read into other slots, with headers that a load accepts, byte for byte."""
    assert rig.fetch([0, 1, 2, 3, 4]) == (5, 0)
    assert [rig.holds(slot, slot) for slot in range(5)] == [True] * 5


def test_known_blocks_are_not_written_again(rig: Rig) -> None:
    """A block that is there is asked for, and not written a second time."""
    before = rig.shelf.puts

    assert rig.back_up([4, 0]) == (2, 0)
    assert rig.shelf.puts == before


def test_long_requests_report_progress(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is reported between two calls of the backend, so a request may take as long as all its calls may."""
    told: list[str] = []
    for call in ("exists", "get", "put"):
        monkeypatch.setattr(rig.shelf, call, heard(told, call, getattr(rig.shelf, call)))
    monkeypatch.setattr(rig.shelf, "capabilities", Capabilities(batch_blocks=2))
    rig.shelf.values.clear()
    requests: list[Request] = [
        Backup(sequence=1, format=KIND, spans=(span([4, 0, 1, 3, 2]),)),
        Fetch(sequence=2, format=KIND, span=span([4, 0, 1, 3, 2]), epoch=9, transfer=8),
        Query(sequence=3, format=KIND, keys=b"".join(KEYS)),
    ]
    seen = []
    for request in requests:
        rig.copies.carry_out(request, lambda: told.append("progress"))
        seen.append(told[::2])
        assert set(told[1::2]) == {"progress"}
        told.clear()

    assert seen == [3 * ["exists", "put"], 3 * ["get"], 3 * ["exists"]]


def heard(told: list[str], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A call that notes its name."""

    def noting(*args: Any, **kwargs: Any) -> Any:
        told.append(name)
        return call(*args, **kwargs)

    return noting


def test_changed_block_is_not_written(rig: Rig) -> None:
    """A block whose header does not name it, as after a changed bit, does not reach storage."""
    rig.shelf.values.clear()
    rig.header(0, 1)[50] ^= 1

    assert rig.back_up([4, 0, 1]) == (3, 2)
    assert [key[16:] for key in rig.shelf.values] == [KEYS[0], KEYS[2]]


def test_failed_write_ends_the_count_before_it(rig: Rig) -> None:
    """Blocks before the one that could not be written count as written, those behind it do not."""
    rig.shelf.values.clear()
    rig.shelf.failing = {KEYS[2]}
    over = rig.copies.carry_out(Backup(sequence=1, format=KIND, spans=(span([4, 0, 1, 3, 2]),)))

    assert over.count == 2
    assert over.failed


@pytest.mark.parametrize("at", [0, 60, 100, 2040, 4096, 5000, 4096 + 2 * BLOCK_BYTES - 1])
def test_changed_byte_ends_the_hit(rig: Rig, at: int) -> None:
    """Whichever byte of a value has changed, it is not used, its slot gets no header, and it is forgotten."""
    (key,) = [key for key in rig.shelf.values if key[16:] == KEYS[1]]
    rig.shelf.values[key][at] ^= 1

    assert rig.fetch([0, 1, 2, 3, 4]) == (1, 1)
    assert bytes(rig.header(1, 0)) == bytes(HEADER_BYTES)
    assert key not in rig.shelf.values


def test_value_of_another_size_is_written_again(rig: Rig) -> None:
    """A value that was cut short counts as wrong and is deleted, so the next backup of its block writes it."""
    rig.fill([0, 1])
    rig.back_up([0, 1])
    (second,) = [key for key in rig.shelf.values if key.endswith(KEYS[1])]
    del rig.shelf.values[second][-1:]

    assert rig.fetch([4, 5]) == (1, 1)

    assert rig.back_up([0, 1]) == (2, 1)
    assert rig.fetch([4, 5]) == (2, 0)


def test_wrong_block_that_cannot_be_deleted_costs_only_itself(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a wrong block cannot be deleted, as on a full disk, the blocks before it are still fetched."""
    (key,) = [key for key in rig.shelf.values if key[16:] == KEYS[1]]
    rig.shelf.values[key][-1] ^= 1

    def full(*_: object, **__: object) -> int:
        raise OSError("database or disk is full")

    monkeypatch.setattr(rig.shelf, "delete", full)

    assert rig.fetch([4, 5, 6]) == (1, 1)


def test_other_block_under_the_key_is_not_used(rig: Rig) -> None:
    """A sound value of another block, of another place in the chain, or of another generation is no hit."""
    one, two = [next(key for key in rig.shelf.values if key[16:] == KEYS[depth]) for depth in (1, 2)]
    rig.shelf.values[one] = rig.shelf.values[two]

    assert rig.fetch([0, 1, 2]) == (1, 1)
    assert rig.fetch([0, 1], [KEYS[0], KEYS[2]]) == (1, 1)


def test_slots_have_no_header_while_they_are_read_into(rig: Rig) -> None:
    """A slot that is about to be overwritten is no block's any more, whether its new block comes or not."""
    rig.shelf.values.clear()

    assert rig.fetch([4, 0, 1]) == (0, 0)
    assert bytes(rig.header(4, 0)) == bytes(HEADER_BYTES)


def test_question_is_answered_up_to_the_first_gap(rig: Rig) -> None:
    """How many of the first blocks there are; of another generation none."""
    rig.shelf.delete([key for key in rig.shelf.values if key[16:] == KEYS[3]], timeout_s=1)

    def found(kind: BlockFormat) -> int:
        return rig.copies.carry_out(Query(sequence=3, format=kind, keys=b"".join(KEYS))).count

    assert found(KIND) == 3
    other = BlockFormat(
        namespace=KIND.namespace,
        header_namespace=KIND.header_namespace,
        header_generation=KIND.header_generation,
        fingerprint=KIND.fingerprint,
        generation=KIND.generation + 1,
        geometry=GEOMETRY,
    )
    assert found(other) == 0
    assert rig.copies.carry_out(Forget(sequence=4, prefix=other.stored().prefix())).count == 0
    progress = Mock()
    assert rig.copies.carry_out(Forget(sequence=5, prefix=KIND.stored().prefix()), progress).count == 4
    assert progress.call_count == 1


def test_blocks_are_deleted_by_their_keys(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the prefix and no others, in batches; a backend that deletes nothing is not asked, which is told."""
    prefix, batches = KIND.stored().prefix(), list[int]()
    rig.shelf.values.update({start + key: bytearray() for start in (prefix, b"o" * 16) for key in KEYS})
    rig.shelf.capabilities = Capabilities(batch_blocks=2)
    delete = rig.shelf.delete

    def counted(keys: Sequence[bytes], *, timeout_s: float) -> int:
        batches.append(len(keys))
        return delete(keys, timeout_s=timeout_s)

    monkeypatch.setattr(rig.shelf, "delete", counted)
    order = Delete(sequence=1, prefix=prefix, keys=b"".join([bytes(16), *KEYS[:4]]))
    progress: list[None] = []
    assert rig.copies.carry_out(order, lambda: progress.append(None)).count == 4
    assert (batches, len(progress)) == ([2, 2, 1], 2)
    assert rig.shelf.values.keys() == {prefix + KEYS[4], *(b"o" * 16 + key for key in KEYS)}

    rig.shelf.capabilities = Capabilities(deletes=False)
    assert (rig.copies.carry_out(order).count, len(batches)) == (-1, 3)


def test_what_may_come_back_is_told_of_a_deletion(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks are deleted, and the answer has what the backend says of their keys."""
    prefix = KIND.stored().prefix()
    monkeypatch.setattr(rig.shelf, "unsettled", lambda keys: f"{keys.index(prefix + KEYS[1])} is late")
    over = rig.copies.carry_out(Delete(sequence=1, prefix=prefix, keys=b"".join(KEYS[:2])))

    assert (over.count, over.failed, over.error) == (2, False, "1 is late")


def test_what_a_backend_raises_is_an_answer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception of a backend fails the order, and says what it was."""

    def fail(*_: object, **__: object) -> list[bool]:
        raise ValueError("odd")

    monkeypatch.setattr(rig.shelf, "exists", fail)
    over = rig.copies.carry_out(Ping(sequence=7))

    assert (over.sequence, over.failed, over.error) == (7, True, "ValueError: odd")
