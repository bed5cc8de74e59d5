"""Jobs for shards, as replies of the daemon make them."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from kvcached_client.blocks.jobs import BlockJob, JobSpan, PackedJob, PackedSpan
from kvcached_client.errors import BadRequest
from kvcached_client.offload import Piece, PreparedLoad, PreparedStore
from kvcached_client.types import TransferId

KEYS = b"".join(bytes([depth]) * 16 for depth in range(6))
#: Where the engine has the blocks of the prompt.
TABLE = [40, 41, 42, 43, 44, 45]


def key(depth: int) -> bytes:
    return KEYS[16 * depth : 16 * (depth + 1)]


def slots(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(numbers, np.int32)


def spans_of(job: BlockJob) -> list[tuple[int, bytes, bytes, list[int], list[int]]]:
    return [
        (span.depth, span.parent, span.keys, list(span.blocks.tolist()), list(span.slots.tolist()))
        for span in job.spans
    ]


def test_load_from_the_beginning_is_one_span() -> None:
    """A hit that is loaded from depth 0 has no parent; the table and the keys may be longer."""
    job = PreparedLoad(TransferId(7), 3, slots(5, 9), 0).job(KEYS, TABLE)
    assert (job.transfer, job.generation, job.start) == (7, 3, 0)
    assert spans_of(job) == [(0, b"", KEYS[:32], [40, 41], [5, 9])]


@pytest.mark.parametrize(("table", "first"), [(TABLE, 0), (TABLE[2:], 2), (np.array(TABLE[1:]), 1)])
def test_load_of_a_part_counts_from_its_start(table: Sequence[int], first: int) -> None:
    """A load from a depth on names the block before it, and bad blocks are counted from there, whatever the table."""
    job = PreparedLoad(TransferId(7), 3, slots(5, 9), 2).job(KEYS, table, first=first)
    assert job.start == 2
    assert spans_of(job) == [(2, key(1), KEYS[32:64], [42, 43], [5, 9])]


def test_store_has_a_span_for_each_piece() -> None:
    """Slots are those of the pieces, in their order, also where a lost block comes before the offer."""
    pieces = (Piece(0, 1), Piece(3, 2))
    job = PreparedStore(TransferId(8), 5, 3, pieces, slots(9, 2, 4)).job(KEYS, TABLE)
    assert spans_of(job) == [(0, b"", key(0), [40], [9]), (3, key(2), KEYS[48:80], [43, 44], [2, 4])]
    assert job.blocks == [40, 43, 44]


def test_job_keeps_its_blocks_when_the_table_changes() -> None:
    """A table that the engine uses again for another request does not change a job."""
    table = np.array(TABLE)
    job = PreparedLoad(TransferId(7), 3, slots(5, 9), 0).job(KEYS, table)
    table[:] = 0
    assert job.blocks == [40, 41]


@pytest.mark.parametrize(
    ("keys", "table", "first"), [(KEYS[:63], TABLE, 0), (KEYS, TABLE[:3], 0), (KEYS, TABLE, 3), (KEYS, [], 0)]
)
def test_table_and_keys_have_to_cover_what_is_prepared(keys: bytes, table: list[int], first: int) -> None:
    """A table or keys that lack a prepared block are the caller's mistake, told before a byte is copied."""
    for plan in (
        PreparedLoad(TransferId(7), 3, slots(5, 9), 2),
        PreparedStore(TransferId(7), 4, 3, (Piece(2, 2),), slots(5, 9)),
    ):
        with pytest.raises(BadRequest, match=r"blocks \[2, 4\) are prepared.*give the keys from the beginning"):
            plan.job(keys, table, first=first)


def test_job_goes_to_another_process() -> None:
    """A job is the same behind a pipe, by its own bytes and by pickle."""
    job = PreparedStore(TransferId(8), 5, 3, (Piece(0, 1), Piece(3, 2)), slots(9, 2, 4)).job(KEYS, TABLE)
    for copy in (BlockJob.from_bytes(job.to_bytes()), pickle.loads(pickle.dumps(job))):  # noqa: S301 - our own
        assert (copy.transfer, copy.generation, copy.start, spans_of(copy)) == (8, 3, 0, spans_of(job))


def test_other_bytes_are_no_job() -> None:
    """Bytes of something else, and numbers that are cut, are refused with what to send."""
    cut = PackedJob(1, 1, 0, (PackedSpan(0, b"", key(0), bytes(7), bytes(8)),))
    for data in (b"", b"\x93\x01\x02\x03", msgspec.msgpack.encode(cut)):
        with pytest.raises(BadRequest, match=r"send BlockJob\.to_bytes"):
            BlockJob.from_bytes(data)


def test_job_is_shown_without_keys() -> None:
    """The words for people say how much is copied, not what."""
    job = BlockJob(TransferId(8), 3, (JobSpan(1, key(0), key(1), array("q", [4]), array("q", [5])),))
    assert repr(job) == "BlockJob(transfer=8, generation=3, start=0, spans=1, blocks=1)"
    assert repr(job.spans[0]) == "JobSpan(depth=1, blocks=1)"
