"""What a configuration has room for: blocks, tokens and bytes, on the devices and in the host pool. Starts nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvcached.config import Config, ReplicaConfig

#: Enough of a namespace's root to tell it from others, as in `kvcached stats`.
_NAMESPACE_SHOWN_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class ReplicaCapacity:
    """What one replica has room for.

    Attributes:
        replica: its name.
        namespace: first 16 hex digits; replicas with the same one share their prefixes and their host slots.
        bytes_per_block: of all shards.
        device_slots, device_tokens, device_bytes: of its own pool, with all shards.
        host_slots_per_slab: blocks in a slab of the host pool; 0 without a host tier.
        host_slots, host_tokens: if the namespace had every slab.
    """

    replica: str
    namespace: str
    bytes_per_block: int
    device_slots: int
    device_tokens: int
    device_bytes: int
    host_slots_per_slab: int
    host_slots: int
    host_tokens: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a daemon has room for.

    Attributes:
        replicas: one by one.
        host_slabs, slab_bytes: of the host pool; 0 without a host tier.
        device_bytes, host_bytes, total_bytes: memory of the device pools, of the host pool, and of both.
    """

    replicas: tuple[ReplicaCapacity, ...]
    host_slabs: int
    slab_bytes: int
    device_bytes: int
    host_bytes: int
    total_bytes: int


def capacity_of(config: Config) -> Capacity:
    """The room that a configuration makes."""
    replicas = tuple(_replica_capacity(config, replica) for replica in config.replica)
    slabs, slab_bytes = (config.host.slabs, config.host.slab_bytes) if config.host is not None else (0, 0)
    device_bytes = sum(replica.device_bytes for replica in replicas)
    return Capacity(
        replicas=replicas,
        host_slabs=slabs,
        slab_bytes=slab_bytes,
        device_bytes=device_bytes,
        host_bytes=slabs * slab_bytes,
        total_bytes=device_bytes + slabs * slab_bytes,
    )


def _replica_capacity(config: Config, replica: ReplicaConfig) -> ReplicaCapacity:
    layout, slots = replica.layout, replica.slot_count
    per_slab = config.host.slots_per_slab(layout) if config.host is not None else 0
    host_slots = per_slab * config.host.slabs if config.host is not None else 0
    return ReplicaCapacity(
        replica=replica.name,
        namespace=replica.namespace(0)[:_NAMESPACE_SHOWN_BYTES].hex(),
        bytes_per_block=layout.bytes_per_block() * layout.shards,
        device_slots=slots,
        device_tokens=slots * layout.block_size,
        device_bytes=layout.pool_bytes(slots) * layout.shards,
        host_slots_per_slab=per_slab,
        host_slots=host_slots,
        host_tokens=host_slots * layout.block_size,
    )
