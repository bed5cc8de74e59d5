"""What a seed's machine looks like: sizes, replicas, models, and which faults are likely."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcached.core.namespaces import PoolSpec
from kvcached.core.transfers.prefetch import PrefetchLimits
from kvcached.core.transfers.storage import StorageSpec
from kvcached.core.transfers.storage_copies import BackupPolicy
from kvcached.service.offload.admission import HostShare, _space
from kvcached_client.blocks.host_layout import PAGE_BYTES, HostGeometry
from kvcached_client.blocks.layout import KvGroup, Layout
from kvcached_client.protocol import engine as wire
from kvcached_client.types import Verify, WritePolicy
from tests.simulation.memory import Shape
from tests.simulation.scheduler import Chance

LAYOUT = Layout(
    block_size=4, shards=2, groups=(KvGroup(layers=1, kv_heads=1, head_dim=32, v_head_dim=32, dtype="float32"),)
)
#: A page of headers and a page of blocks for each of two shards.
SLAB_BYTES = 4 * PAGE_BYTES
#: Of blocks of engines in offload mode, in bytes, with the number of their shards.
_OFFLOAD_BLOCKS = ((2, 1024), (2, 1300), (1, 2048), (2, 700))
FAULTS = (
    "engine process killed",
    "engine process stopped",
    "engine stopped",
    "worker killed",
    "worker hangs",
    "worker is slow",
    "copy fails",
    "bit rots",
    "machine suspended",
    "daemon stalls",
    "daemon killed",
    "weather changes",
    "storage killed",
    "storage hangs",
    "storage weather changes",
    "stored bit rots",
)
#: Those that take a while to show what they do.
_OFTEN = ("engine process stopped", "engine stopped", "engine process killed", "worker hangs", "bit rots")
#: Those after which nobody expires for a while.
_SELDOM = ("machine suspended", "daemon stalls")
_WEIGHTS = (0.0, 1.0, 2.0)


@dataclass(frozen=True)
class OffloadModel:
    """A namespace that engines in offload mode may declare."""

    number: int
    label: str
    keyspace: bytes
    block_size: int
    shape: Shape


@dataclass
class Plan:
    """Drawn once for each seed.

    Attributes:
        replicas: their first namespaces; those that share one share its host slots.
        fault_weights: how likely each fault is among all; 0 where this seed has none of it.
        copy_failures: how likely it is that a shard of an engine gives up a copy.
        operators: people who pause, drain, clear, set weights and policies, pin, and attach storage.
        write_policy: that the configuration says, for replicas; `namespaces_policy` for engines in offload mode.
        diversity: how often prompts part at each of their blocks.
        topics: what prompts begin with; each has its time, and comes back when its blocks have left memory.
        eviction_policy: of the host pool and of device pools.
        storage: what is copied to it, and when it is asked; None where there is none.
    """

    replicas: dict[str, bytes]
    slots: int
    slabs: int
    spaces: int
    watermark: int
    load_threshold: int
    load_quota: int | None
    models: list[OffloadModel]
    rival: bool
    offload_engines: int
    copy_failures: float
    operators: int
    fault_weights: dict[str, float]
    write_policy: WritePolicy
    namespaces_policy: WritePolicy
    diversity: float
    topics: int
    eviction_policy: str
    pin_quota_percent: int
    storage: StorageSpec | None
    layout: Layout = LAYOUT
    slab_bytes: int = SLAB_BYTES
    shapes: dict[bytes, Shape] = field(default_factory=dict)

    def pool_specs(self, namespaces: Mapping[str, bytes], policies: Mapping[str, WritePolicy]) -> list[PoolSpec]:
        """The pools, for replicas whose namespaces and write policies are these now."""
        return [
            PoolSpec(
                name,
                namespaces[name],
                self.layout.block_size,
                self.slots,
                self.layout.shards,
                self.shapes[namespace].geometry.slots_per_slab,
                self.watermark,
                self.load_threshold,
                self.load_quota,
                policies[name],
                self.eviction_policy,
            )
            for name, namespace in self.replicas.items()
        ]


def draw(chance: Chance, *, reboots: bool = False, sleeps: bool = False) -> Plan:
    """A machine; one that is restarted has storage, whose blocks are cleared now and then."""
    spaces, slabs = 2, chance.among([4, 4, 5, 6, 8, 10])
    second = chance.among([b"one", b"two"]).ljust(32, b".")
    replicas = {"a": b"one".ljust(32, b"."), "b": second}
    managed = HostGeometry(
        slabs=slabs, slab_bytes=SLAB_BYTES, shards=LAYOUT.shards, block_bytes=LAYOUT.bytes_per_block()
    )
    models = [_model(number, slabs) for number in range(chance.number(1, spaces + 1))]
    plan = Plan(
        replicas=replicas,
        slots=chance.among([12, 20, 32]),
        slabs=slabs,
        spaces=spaces,
        watermark=chance.among([0, 2, 4]),
        load_threshold=chance.among([1, 1, 2]),
        load_quota=chance.among([None, 3]),
        models=models,
        rival=chance.happens(0.5),
        offload_engines=chance.number(1, 3),
        copy_failures=chance.among([0.0, 0.05]),
        operators=chance.among([1, 1, 2] if reboots or sleeps else [0, 1, 2]),
        fault_weights={name: _weight(chance, name) for name in FAULTS},
        write_policy=_policy(chance),
        namespaces_policy=_policy(chance),
        diversity=chance.among([0.15, 0.15, 0.4]),
        topics=chance.among([1, 3]),
        eviction_policy=chance.among(["lru", "lru", "slru"]),
        pin_quota_percent=chance.among([25, 60]),
        storage=_storage(chance) if chance.happens(0.8) or reboots else None,
    )
    fingerprint = bytes.fromhex(LAYOUT.fingerprint())
    plan.shapes = {root: Shape(root, fingerprint, managed) for root in replicas.values()}
    plan.shapes.update({model.shape.root: model.shape for model in models})
    return plan


def _policy(chance: Chance) -> WritePolicy:
    return WritePolicy.WRITE_THROUGH if chance.happens(0.6) else chance.among(list(WritePolicy))


def _storage(chance: Chance) -> StorageSpec:
    backup = BackupPolicy.EVERY if chance.happens(0.6) else chance.among(list(BackupPolicy))
    limits = PrefetchLimits(
        threshold_blocks=chance.among([1, 1, 3]), bytes_per_s=chance.among([0, 0, 0, 20_000]), slab_bytes=SLAB_BYTES
    )
    return StorageSpec(backup, chance.among([10, 50, 100]), limits)


def _weight(chance: Chance, fault: str) -> float:
    if fault in _OFTEN:
        return chance.among([1.0, 3.0, 6.0])
    return chance.among(_WEIGHTS) * (0.6 if fault in _SELDOM else 1.0)


def _model(number: int, slabs: int) -> OffloadModel:
    shards, block_bytes = _OFFLOAD_BLOCKS[number % len(_OFFLOAD_BLOCKS)]
    geometry = HostGeometry(slabs=slabs, slab_bytes=SLAB_BYTES, shards=shards, block_bytes=block_bytes)
    hello = wire.HelloOffload(
        id=1,
        version_min=1,
        version_max=1,
        member=bytes(wire.TOKEN_SIZE_BYTES),
        engine="simulated",
        instance=bytes(16),
        label=f"model {number}",
        keyspace=bytes([number]) * 32,
        block_size=4,
        shards=shards,
        block_bytes=block_bytes,
        fingerprint=bytes([number]) * 16,
    )
    root = _space(hello, HostShare(0, 0, slabs, SLAB_BYTES, verify=Verify.ALWAYS)).root
    return OffloadModel(number, hello.label, hello.keyspace, hello.block_size, Shape(root, hello.fingerprint, geometry))
