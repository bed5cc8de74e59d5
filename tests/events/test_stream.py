"""Batches and their numbers."""

from __future__ import annotations

import pytest

from kvcached.core.messages import BlocksRemoved, BlocksStored, IndexChange, Tier
from kvcached.core.slots.announced import Announced
from kvcached.core.slots.ranges import one_range
from kvcached.events import stream, wire
from kvcached.events.stream import EventStream

EPOCH = 1_800_000_000_000
TIER = Tier(b"root", 3, "model", "a", 0, 16)
HOST = TIER._replace(replica="", rank=None)


def keys(count: int, first: int = 0) -> bytes:
    return b"".join(number.to_bytes(16, "big") for number in range(first, first + count))


def make_stream(changes: list[IndexChange], epoch: int = EPOCH, buffer_bytes: int = 1 << 20) -> EventStream:
    return EventStream(changes, list, topic="kv@n@", epoch=epoch, buffer_bytes=buffer_bytes, now_s=lambda: 1.0)


def test_numbers_go_up_by_one_and_a_restart_begins_above_them() -> None:
    """Batches have consecutive numbers; a later daemon's first one is above them, below 2^53."""
    changes: list[IndexChange] = []
    first = make_stream(changes)
    numbers = [first.last.number]
    for _ in range(3):
        changes.append(BlocksRemoved(TIER, keys(1)))
        numbers += [batch.number for batch in first.flush()]

    assert numbers == list(range(numbers[0], numbers[0] + 4))
    assert numbers[-1] < make_stream([], EPOCH + 1).last.number < 1 << 53


def test_one_flush_makes_a_batch_for_each_tier() -> None:
    """What has happened since the last flush is one batch a tier, with the namespace's label in its topic."""
    changes: list[IndexChange] = [
        BlocksStored(TIER, b"", keys(2)),
        BlocksStored(HOST, b"", keys(2)),
        BlocksStored(TIER, keys(1, 1), keys(2, 2)),
        BlocksRemoved(HOST, keys(1)),
        BlocksRemoved(HOST, keys(1, 1)),
    ]

    batches = make_stream(changes).flush()

    device, host = [wire.decode_batch(batch.payload) for batch in batches]
    assert {batch.topic for batch in batches} == {b"kv@n@model"}
    assert (device.data_parallel_rank, host.data_parallel_rank) == (0, None)
    assert [wire.hashes_of(event) for event in device.events if isinstance(event, wire.BlockStored)] == [
        [keys(1, number) for number in range(4)]
    ]
    assert [type(event).__name__ for event in host.events] == ["BlockStored", "BlockRemoved"]
    assert changes == []


def test_large_changes_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch has more keys than its limit, and the pieces of a chain follow each other."""
    monkeypatch.setattr(stream, "KEYS_PER_EVENT_MAX", 4)

    batches = make_stream([BlocksStored(TIER, b"", keys(3)), BlocksStored(TIER, b"", keys(10))]).flush()

    found = [wire.decode_batch(batch.payload).events for batch in batches]
    sizes = [
        [len(wire.hashes_of(event)) for event in events if isinstance(event, wire.BlockStored)] for events in found
    ]
    assert sizes == [[3], [4], [4], [2]]
    assert [getattr(events[0], "parent_block_hash") for events in found] == [None, None, keys(1, 3), keys(1, 7)]  # noqa: B009


def test_blocks_that_leave_at_once_are_not_told() -> None:
    """Blocks that come and leave between two batches, as those of a health check, make no event."""
    changes: list[IndexChange] = []
    announced = Announced(changes, TIER, 8)
    events = EventStream(changes, lambda: [announced], topic="", epoch=1, buffer_bytes=1, now_s=lambda: 1.0)
    announced.add(b"", keys(2), one_range(0, 2))
    announced.remove(one_range(0, 2))

    assert events.flush() == []

    announced.add(b"", keys(1), one_range(0, 1))
    announced.add(b"", keys(2, 7), one_range(2, 2))
    announced.remove(one_range(2, 2))
    (batch,) = events.flush()
    (stored,) = wire.decode_batch(batch.payload).events
    assert isinstance(stored, wire.BlockStored)
    assert wire.hashes_of(stored) == [keys(1)]


def test_blocks_that_a_snapshot_has_shown_are_told_as_gone() -> None:
    """Where a snapshot was taken between a block's two changes, both are told: its reader knows of the block."""
    changes: list[IndexChange] = []
    announced = Announced(changes, TIER, 8)
    events = EventStream(changes, lambda: [announced], topic="", epoch=1, buffer_bytes=1, now_s=lambda: 1.0)
    announced.add(b"", keys(2), one_range(0, 2))
    _, piece = events.snapshot()
    announced.remove(one_range(0, 2))

    (batch,) = events.flush()

    assert [type(event).__name__ for event in wire.decode_batch(piece.payload).events] == ["BlockStored"]
    assert [type(event).__name__ for event in wire.decode_batch(batch.payload).events] == [
        "BlockStored",
        "BlockRemoved",
    ]


def test_batch_that_is_published_during_a_snapshot_is_behind_its_number() -> None:
    """The reader applies it to the pieces: a change behind a piece that was sent is in no other place."""
    changes: list[IndexChange] = []
    announced = Announced(changes, TIER, 8)
    events = EventStream(changes, lambda: [announced], topic="", epoch=1, buffer_bytes=1, now_s=lambda: 1.0)
    announced.add(b"", keys(2), one_range(0, 2))
    (before,) = events.flush()
    begin, _ = events.snapshot()
    announced.remove(one_range(0, 2))
    (batch,) = events.flush()

    assert before.number == begin.number < batch.number


def test_blocks_without_neighbours_take_no_larger_messages() -> None:
    """Of blocks that are an event each, neither a message nor a piece of a snapshot has more bytes than of others."""
    changes: list[IndexChange] = []
    count = 10_000
    announced = Announced(changes, HOST, count)
    for slot in range(count):
        announced.add(keys(1, 2 * count + slot), keys(1, slot), one_range(slot, 1))
    events = EventStream(changes, lambda: [announced], topic="", epoch=1, buffer_bytes=1, now_s=lambda: 1.0)

    batches, turns = [], 0
    while events.has_more:
        turns += 1
        batches += events.flush()
    begin, *pieces = events.snapshot()

    assert begin.number == batches[-1].number
    assert turns == -(-count // stream.CHANGES_PER_FLUSH_MAX)
    for told, size_max in ((batches, 320_000), (pieces, 64_000)):
        assert max(len(batch.payload) for batch in told) < size_max
        stored = [event for batch in told for event in wire.decode_batch(batch.payload).events]
        assert [key for event in stored if isinstance(event, wire.BlockStored) for key in wire.hashes_of(event)] == [
            keys(1, slot) for slot in range(count)
        ]


def test_buffer_is_bounded() -> None:
    """What can be asked for again takes no more than the buffer has; the oldest batches go first."""
    changes: list[IndexChange] = []
    events = make_stream(changes, buffer_bytes=4096)
    for _ in range(100):
        changes.append(BlocksRemoved(TIER, keys(10)))
        events.flush()

    kept = list(events.replay(0))

    assert sum(len(batch.payload) for batch in kept) <= 4096
    assert [batch.number for batch in kept] == list(range(events.last.number - len(kept) + 1, events.last.number + 1))
    assert len(kept) > 3


def test_replay_goes_on_where_batches_are_dropped_meanwhile() -> None:
    """A replay that takes long leaves out what is dropped while it goes on: the numbers say so."""
    changes: list[IndexChange] = []
    events = make_stream(changes, buffer_bytes=2048)
    replay = events.replay(0)
    first = next(replay).number
    for _ in range(50):
        changes.append(BlocksRemoved(TIER, keys(10)))
        events.flush()

    numbers = [batch.number for batch in replay]

    assert numbers[0] > first + 1
    assert numbers[-1] == events.last.number


def test_batches_about_a_namespace_have_its_topics() -> None:
    """Each batch is published once for each topic of its namespace, with a number of its own, and so are snapshots."""
    changes: list[IndexChange] = [
        BlocksStored(TIER, b"", keys(1)),
        BlocksStored(HOST._replace(label="b"), b"", keys(1)),
    ]
    announced = Announced([], TIER, 8)
    announced.inherit(b"", keys(2), one_range(0, 2))
    topics = {"model": ("kv@pod-1@llama", "kv@pod-2@llama"), "b": ("kv@n@b",)}
    events = EventStream(
        changes, lambda: [announced], topic="kv@n@", epoch=1, buffer_bytes=1 << 16, now_s=lambda: 1.0,
        topics=topics.__getitem__,
    )  # fmt: skip

    batches = events.flush()

    assert [batch.topic for batch in batches] == [b"kv@pod-1@llama", b"kv@pod-2@llama", b"kv@n@b"]
    assert [batch.number - batches[0].number for batch in batches] == [0, 1, 2]
    assert batches[0].payload == batches[1].payload != batches[2].payload
    assert [piece.topic for piece in events.snapshot()] == [b"", b"kv@pod-1@llama", b"kv@pod-2@llama"]
