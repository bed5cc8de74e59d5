"""A conversation with a real daemon: each turn sends the keys behind the last one, also over the daemon's death."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcached_client import Client, KeyChain, MappedPool, map_pool
from kvcached_client.protocol.engine import KNOWN_BLOCKS_MIN
from kvcached_client.types import KEY_SIZE_BYTES, AcquiredPrefix
from tests.daemon.conftest import CONFIG
from tests.daemon.supervised import supervised

BLOCK_SIZE = 4
TURN_BLOCKS = 3
KEPT = CONFIG.replace("slots = 16", "slots = 128") + "[host]\nsize_bytes = 4194304\nslab_bytes = 1048576\n"


def serve(client: Client, pool: MappedPool, chain: KeyChain) -> int:
    """One turn: each block of the hit has the bytes of its key, and each other one gets them. Returns the hit."""
    pages = pool.pages(1)
    with client.acquire("turn", chain, full=True) as lease:
        for depth, slot in enumerate(lease.block_table):
            if depth >= lease.hit_blocks:
                pages[slot] = chain.key_range(depth, depth + 1)[0]
            assert (pages[slot] == chain.key_range(depth, depth + 1)[0]).all()
        lease.finish(chain.token_count)
    return lease.hit_blocks


def keys_sent(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many keys each acquire sends from now on."""
    counts: list[int] = []
    asking = client._channel.asking

    def counted(request: object, expected: object, frames: tuple[bytes, ...] = (), **options: object) -> object:
        if frames:
            counts.append(len(frames[0]) // KEY_SIZE_BYTES)
        return asking(request, expected, frames, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(client._channel, "asking", counted)
    return counts


@pytest.mark.end_to_end
def test_each_turn_hits_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every turn hits all of the last one. A daemon that does not know the conversation is sent all keys."""
    with (
        supervised(tmp_path, KEPT) as daemon,
        Client.connect(daemon.run_dir, deadline_ms=10_000) as client,
        map_pool(client.session, 0, deadline_ms=10_000) as pool,
    ):
        counts = keys_sent(client, monkeypatch)
        blocks = KNOWN_BLOCKS_MIN
        chain = client.chain(range(blocks * BLOCK_SIZE))
        hits = []
        for _ in range(3):
            hits.append(serve(client, pool, chain))
            chain = chain.fork()
            chain.extend(range(TURN_BLOCKS * BLOCK_SIZE))
        assert (hits, counts) == ([0, blocks, blocks + TURN_BLOCKS], [blocks, 1 + TURN_BLOCKS, 1 + TURN_BLOCKS])

        daemon.kill()
        daemon.await_ready()
        client.rejoin()
        counts = keys_sent(client, monkeypatch)
        chain.acquired = AcquiredPrefix(client._channel.prompts, blocks)  # as if the next daemon knew it
        assert serve(client, pool, chain) == blocks + 2 * TURN_BLOCKS
        assert counts == [1 + 3 * TURN_BLOCKS, chain.block_count]
