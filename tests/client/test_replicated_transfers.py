"""Jobs of shards that all hold the same bytes: together they write each block once, and each reads all."""

from __future__ import annotations

import msgspec
import pytest

from kvcached_client.blocks.pages import EnginePages
from kvcached_client.blocks.transfers import BlockTransfers
from tests.client.offload_rig import EPOCH, FINGERPRINT, NAMESPACE, EngineRig, engine_rig, job, layer, span

SHARDS = 2
SOURCES, SLOTS, TARGETS = [0, 3, 1], [2, 3, 7], [4, 5, 6]


@pytest.fixture
def shards() -> list[tuple[EngineRig, BlockTransfers]]:
    """Two shards with equal tensors of their own, and one host pool."""
    with engine_rig([layer(8, 96), layer(8, 160)]) as first, engine_rig([layer(8, 96), layer(8, 160)]) as second:
        host = msgspec.structs.replace(first.host, replicated=True)
        made = []
        for shard, rig in enumerate((first, second)):
            pages = EnginePages.of_tensors({f"layer{index}": tensor for index, tensor in enumerate(rig.tensors)})
            transfers = BlockTransfers(pages, host, shard, first.memory, namespace=NAMESPACE, fingerprint=FINGERPRINT)
            made.append((rig, transfers))
        return made


def test_shards_store_a_share_each_and_load_all(shards: list[tuple[EngineRig, BlockTransfers]]) -> None:
    """After the first shard's store its share is there, after the second's all; then each loads every block."""
    (first, one), (_, two) = shards
    wanted = [first.block(index) for index in SOURCES]
    missing = []
    for transfers in (one, two):
        transfers.store(job(span(SOURCES, SLOTS)), epoch=EPOCH)
        missing.append(one.load(job(span(TARGETS, SLOTS)), verify=True))
    for index in TARGETS:
        first.fill(index, 0)

    assert missing == [[1, 2], []]
    for rig, transfers in shards:
        assert transfers.load(job(span(TARGETS, SLOTS)), verify=True) == []
        assert [rig.block(index) for index in TARGETS] == wanted


def test_a_shard_without_a_share_touches_nothing(shards: list[tuple[EngineRig, BlockTransfers]]) -> None:
    """Of a store of one block one shard has nothing to write, and the pool stays as it was."""
    (first, one), (_, two) = shards
    before = bytes(first.memory)
    one.store(job(span([0], [2])), epoch=EPOCH)

    assert bytes(first.memory) == before
    two.store(job(span([0], [2])), epoch=EPOCH)
    assert one.load(job(span([4], [2])), verify=True) == []
