"""The messages are vLLM's: its own definitions read them, and so does a decoder that knows nothing of this project."""

from __future__ import annotations

import subprocess
from array import array
from typing import Any

import msgspec
import pytest

from kvcached.core.messages import AllRemoved, BlocksRemoved, BlocksStored, Tier
from kvcached.events import wire
from kvcached.events.token_book import TokensStored
from tests.vllm.server import interpreter

HOST = Tier(b"\xaa" * 32, 7, "model bfloat16 tp1", "", None, 16)
DEVICE = HOST._replace(replica="a", rank=1)
KEYS = [bytes([number]) * 16 for number in range(3)]
TOKENS = [0, 127, 128, 65_535, 65_536, 151_935, *range(26)]  # two blocks, in all sizes of MessagePack's integers


# What vLLM 0.32 has in vllm/distributed/kv_events.py, field by field.
class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


#: Run by vLLM's interpreter: decodes a batch by vLLM's definitions, and prints what came of it.
READ_BY_VLLM = """
import sys
import msgspec
from vllm.distributed.kv_events import KVEventBatch
batch = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=KVEventBatch)
sys.stdout.buffer.write(msgspec.json.encode(batch))
"""


def packed(tier: Tier) -> bytes:
    """A batch of one event of each kind."""
    changes: list[wire.Told] = [
        TokensStored(tier, KEYS[0], b"".join(KEYS[1:]), array("i", TOKENS).tobytes()),
        BlocksRemoved(tier, KEYS[2]),
        BlocksStored(tier, b"", KEYS[0]),
        AllRemoved(tier),
    ]
    return wire.encode_batch(1.5, changes, tier.rank)


def check(batch: Any, medium: str, rank: int | None) -> None:
    """The batch has the four events, as an object of vLLM's classes."""
    stored, removed, first, cleared = batch.events
    assert (batch.ts, batch.data_parallel_rank) == (1.5, rank)
    assert (stored.block_hashes, stored.parent_block_hash, stored.token_ids) == (KEYS[1:], KEYS[0], TOKENS)
    assert (stored.block_size, stored.medium, stored.lora_id, stored.lora_name) == (16, medium, None, None)
    assert (removed.block_hashes, removed.medium) == (KEYS[2:], medium)
    assert (first.parent_block_hash, first.token_ids) == (None, [])
    assert type(cleared).__name__ == "AllBlocksCleared"


@pytest.mark.parametrize(("tier", "medium"), [(HOST, "CPU"), (DEVICE, "GPU")])
def test_definitions_of_vllm_read_the_events(tier: Tier, medium: str) -> None:
    """A copy of the definitions of vLLM 0.32 reads every event, and passes over the fields that it does not know."""
    check(msgspec.msgpack.decode(packed(tier), type=KVEventBatch), medium, tier.rank)


@pytest.mark.vllm
@pytest.mark.parametrize(("tier", "medium"), [(HOST, "CPU"), (DEVICE, "GPU")])
def test_installed_vllm_reads_the_events(tier: Tier, medium: str) -> None:
    """The definitions of the vLLM that is installed read every event."""
    done = subprocess.run(
        [interpreter(), "-c", READ_BY_VLLM], input=packed(tier), capture_output=True, check=True, timeout=60
    )
    check(msgspec.json.decode(done.stdout, type=KVEventBatch), medium, tier.rank)


def test_events_name_their_namespace() -> None:
    """Each event has the namespace's root and generation; a batch has three items, whatever the rank."""
    batch: list[Any] = msgspec.msgpack.decode(packed(HOST))

    assert len(batch) == 3
    assert {(event["namespace"], event["generation"]) for event in batch[1]} == {("aa" * 32, 7)}
    assert [event["type"] for event in batch[1]] == ["BlockStored", "BlockRemoved", "BlockStored", "AllBlocksCleared"]


def test_own_definitions_read_the_events_back() -> None:
    """What was encoded is decoded to the same keys."""
    batch = wire.decode_batch(packed(HOST))

    (stored, *_) = batch.events
    assert isinstance(stored, wire.BlockStored)
    assert wire.hashes_of(stored) == KEYS[1:]


@pytest.mark.parametrize("key", [bytes(16), b"\xff" * 16, bytes(range(16)), bytes(15) + b"\1"])
def test_integers_are_those_of_vllm(key: bytes) -> None:
    """Keys as integers are the ends of the keys, as vLLM and llm-d shorten them; a decoder of 64 bits reads them."""
    parent = key[::-1]
    changes: list[wire.Told] = [BlocksStored(HOST, parent, key + KEYS[1]), BlocksRemoved(HOST, key)]
    stored, removed = wire.decode_batch(wire.encode_batch(1.5, changes, None, "int")).events

    assert isinstance(stored, wire.BlockStored)
    assert isinstance(removed, wire.BlockRemoved)
    ends = [int.from_bytes(each, "big") & (1 << 64) - 1 for each in (key, KEYS[1], parent)]
    assert [*wire.hashes_of(stored), stored.parent_block_hash] == ends
    assert wire.hashes_of(removed) == ends[:1]
    assert stored.token_ids == ()


def test_numbers_that_look_like_the_gap_are_no_gap() -> None:
    """Block sizes and generations with the bytes by which an event is cut are packed as they are."""
    tier = HOST._replace(block_size=0xC1C1C1C1, generation=0xC1C1C1C1C1C1C1C1)

    stored = wire.decode_batch(packed(tier)).events[2]

    assert isinstance(stored, wire.BlockStored)
    assert (stored.block_size, stored.generation) == (tier.block_size, tier.generation)
