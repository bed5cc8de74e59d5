"""Engines that hold something until they are killed: ``python -m benchmarks.fault_engine managed|attached RUN_DIR``."""

from __future__ import annotations

import sys
from typing import Final

from kvcached_client import Client
from kvcached_client.offload import OffloadClient, OffloadLayout, new_instance
from kvcached_client.types import KEY_SIZE_BYTES

BLOCKS: Final = 64
BLOCK_SIZE: Final = 16
BLOCK_BYTES: Final = 4096
_DEADLINE_MS: Final = 10_000


def hold_slots(run_dir: str) -> Client:
    """A lease on slots of the device pool, which this process may write."""
    client = Client.connect(run_dir, deadline_ms=_DEADLINE_MS)
    client.acquire("held", client.chain(range(BLOCKS * BLOCK_SIZE)))
    return client


def hold_store(run_dir: str) -> OffloadClient:
    """A store under way in the host pool, whose slots this process may write."""
    client = OffloadClient.connect(
        run_dir,
        engine="benchmark",
        instance=new_instance(),
        keyspace=bytes(32),
        label="benchmark",
        layout=OffloadLayout(BLOCK_SIZE, 1, BLOCK_BYTES, bytes(16)),
        deadline_ms=_DEADLINE_MS,
    )
    keys = b"".join(number.to_bytes(KEY_SIZE_BYTES, "little") for number in range(1, BLOCKS + 1))
    hold = client.acquire("held", keys, BLOCKS * BLOCK_SIZE, full=True)
    client.prepare_store(hold.lease, hold.hit, keys[KEY_SIZE_BYTES * hold.hit :])
    return client


if __name__ == "__main__":
    with hold_slots(sys.argv[2]) if sys.argv[1] == "managed" else hold_store(sys.argv[2]):
        sys.stdout.write("holds\n")
        sys.stdout.flush()
        sys.stdin.read()
