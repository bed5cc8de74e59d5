"""The worker's part of the health check: a pattern goes through two slots and is read back."""

from __future__ import annotations

import hashlib

import xxhash

from kvcached.worker.device_pool import DevicePool
from kvcached.worker.messages import Probe


class CorruptCopy(Exception):
    """A probe read back other bytes than it wrote."""


def probe(pool: DevicePool, work: Probe) -> None:
    """Write a pattern into one slot, copy it to another and compare both with it. Both slots are zero afterwards.

    Raises:
        CorruptCopy: a slot reads differently.
        ValueError: a slot is not in the pool, or both are the same.
    """
    pattern = hashlib.shake_128(b"kvcached probe" + work.seed.to_bytes(8, "little")).digest(pool.slot_bytes)
    expected = xxhash.xxh3_128_digest(pattern)
    try:
        pool.fill(work.source, pattern)
        pool.duplicate(work.source, work.target)
        for slot in (work.source, work.target):
            if (found := pool.checksum(slot)) != expected:
                raise CorruptCopy(
                    f"probe {work.source} → {work.target}, seed {work.seed}: slot {slot} has checksum {found.hex()}, "
                    f"expected {expected.hex()}"
                )
    finally:
        pool.zero(work.source)
        pool.zero(work.target)
