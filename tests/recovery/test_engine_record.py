"""What the daemon records of an engine pool, for the next daemon."""

from __future__ import annotations

import random

import pytest

from kvcached.memory.engine_record import RECORD_BYTES, EngineRecord, PoolHead, Writer, claim_digest

ON_CPU = PoolHead(bytes(range(16)), "modèle tp2", 20, 1 << 20, ((1, 2), (3, 4)))
DEVICE = "GPU-00000001-0000-4000-8000-000000000000"
ON_DEVICES = PoolHead(bytes(range(16)), "modèle tp2", 20, 1 << 20, devices=(DEVICE, ""))


@pytest.mark.parametrize("head", [ON_CPU, ON_DEVICES], ids=["CPU", "CUDA devices"])
def test_head_is_read_as_it_was_written(head: PoolHead) -> None:
    """A damaged byte of the head is noticed, wherever it is."""
    memory = bytearray(RECORD_BYTES)
    EngineRecord(memoryview(memory)).write_head(head)
    assert PoolHead.unpack(bytes(memory)) == head
    for place in random.Random(1).sample(range(1540), 50):
        damaged = bytearray(memory)
        damaged[place] ^= 0x10
        assert PoolHead.unpack(bytes(damaged)) is None


def test_writers_and_uses_stand_beside_the_head() -> None:
    """Each has its place; a head that is written again leaves them."""
    memory = bytearray(RECORD_BYTES)
    record = EngineRecord(memoryview(memory))
    writers = {place: Writer(pid=place + 1, started=place, namespace=1 << 63) for place in (0, 1, 63)}
    for place, writer in writers.items():
        record.note_writer(place, writer)
    record.note_use(1 << 40, claim_digest("start"))
    record.write_head(ON_CPU)

    assert {place: record.writer(place) for place in writers} == writers
    assert (record.writer(2).pid, record.used_s, PoolHead.unpack(bytes(memory))) == (0, 1 << 40, ON_CPU)
    assert record.claim == claim_digest("start")


def test_claim_that_is_not_surely_the_last_one_is_none() -> None:
    """That of a new record, a damaged one, and one whose pool was asked for at a daemon that notes no claims."""
    memory = bytearray(RECORD_BYTES)
    record = EngineRecord(memoryview(memory))
    assert record.claim == b""
    record.note_use(7, claim_digest("start"))
    assert record.claim == claim_digest("start")
    for place in random.Random(1).sample(range(2048, 2100), 30):
        damaged = bytearray(memory)
        damaged[place] ^= 0x10
        assert EngineRecord(memoryview(damaged)).claim == b""
    memory[2048:2056] = (8).to_bytes(8, "little")  # as daemons before this version note a use
    assert (record.used_s, record.claim) == (8, b"")
