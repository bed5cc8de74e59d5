"""Memory and workers for the model of the tiers: what every slot contains on every shard, and copies that take time.

A copy may touch its slots at any moment between its start and its acknowledgement. So the source must have the right
bytes at both ends, and the target is wiped at the start and must be untouched by anybody else until it is written.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field

from kvcached.core.cache import Cache
from kvcached.core.index.host_tree import HOST
from kvcached.core.index.run import KEY_SIZE, Run
from kvcached.core.messages import (
    AbandonLoad,
    Effect,
    HurryTransfer,
    LoadsEnded,
    StartTransfer,
    TransferKind,
)
from kvcached.core.slots.ranges import Ranges, pairs
from kvcached.core.slots.states import SlotState
from kvcached_client.types import LeaseId, ShardIndex, TransferId
from tests.core.device_headers import DeviceHeaders
from tests.core.slab_memory import Content, SlabMemory, SlotView

SHARDS = 2
#: Replicas and their namespaces.
NAMESPACES = {"a": b"one", "b": b"one", "c": b"two"}


def slots_of(ranges: Ranges[int]) -> list[int]:
    """Ranges as single slots; a hole's are negative."""
    return [slot for first, count in pairs(ranges) for slot in range(first, first + count)]


def keys_in(packed: bytes | bytearray) -> list[bytes]:
    """Packed keys, one by one."""
    return [bytes(packed[at : at + KEY_SIZE]) for at in range(0, len(packed), KEY_SIZE)]


@dataclass
class Copy:
    """A transfer as the workers of one pool see it: blocks as (key, device slot, host slot)."""

    order: StartTransfer
    blocks: list[tuple[bytes, int, int]]
    waiting: set[int] = field(default_factory=lambda: set(range(SHARDS)))
    urgent: bool = False
    lost: bool = False  #: its pool's workers are dead


class World:
    """What the cache's effects do to memory, and what it is told of them.

    Attributes:
        memory: of the host pool, in which engines in offload mode may have blocks, too.
    """

    def __init__(self, cache: Cache, per_slab: int) -> None:
        self.cache = cache
        self.memory, self.per_slab = SlabMemory(SHARDS), per_slab
        self.device: dict[str, list[dict[int, Content]]] = {name: [{} for _ in range(SHARDS)] for name in NAMESPACES}
        self.host: dict[bytes, list[MutableMapping[int, Content]]] = {
            name: [SlotView(self.memory, shard, per_slab) for shard in range(SHARDS)] for name in NAMESPACES.values()
        }
        #: slots whose bytes an engine has queued, but not written yet
        self.unwritten: dict[str, set[int]] = {name: set() for name in NAMESPACES}
        self.parents: dict[bytes, bytes] = {}  #: key before a key
        self.copies: dict[TransferId, Copy] = {}
        self.over: list[TransferId] = []
        #: host slots that a worker found rotten, while that is their content
        self.reported: set[tuple[bytes, int]] = set()
        #: leases whose loads have ended since somebody last looked
        self.told: list[LeaseId] = []
        self.headers = DeviceHeaders(cache)

    # --- effects ----------------------------------------------------------------------------------------------------

    def carry_out(self) -> list[str]:
        """Do what the cache asks for; the kinds of what it was."""
        self.headers.look()
        effects, self.cache.effects[:] = self.cache.effects[:], []
        for effect in effects:
            self._carry_out(effect)
        return [type(effect).__name__ for effect in effects]

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case StartTransfer():
                self._start(effect)
            case HurryTransfer():
                copy = self.copies[effect.transfer]
                assert (copy.order.pool, copy.urgent) == (effect.pool, False), "hurried twice"
                copy.urgent = True
            case AbandonLoad():
                assert effect.transfer not in self.copies, "a load that was started is never abandoned"
            case LoadsEnded():
                assert effect.lease not in self.told
                self.told.append(effect.lease)
            case _:
                pass

    def _start(self, order: StartTransfer) -> None:
        blocks: list[tuple[bytes, int, int]] = []
        for span in order.spans:
            keys, device, host = keys_in(span.keys), slots_of(span.device), slots_of(span.host)
            assert len(keys) == len(device) == len(host) > 0
            assert min(device + host) >= 0
            assert bool(span.depth) == bool(span.parent)
            blocks += zip(keys, device, host, strict=True)
        copy = self.copies[order.transfer] = Copy(order, blocks, urgent=order.urgent)
        assert order.transfer not in self.over
        is_store = order.kind is TransferKind.STORE
        self.memory.hold(order.transfer, self.per_slab, (host for _, _, host in blocks), writes=is_store)
        if is_store:
            self.reported.difference_update((NAMESPACES[order.pool], host) for _, _, host in blocks)
        for shard in range(SHARDS):
            for block in blocks:
                self._check_source(copy, shard, *block)
                self._target(copy, shard)[block[2] if is_store else block[1]] = (
                    "copy",
                    order.transfer,
                )

    def _target(self, copy: Copy, shard: int) -> MutableMapping[int, Content]:
        name = copy.order.pool
        return self.host[NAMESPACES[name]][shard] if copy.order.kind is TransferKind.STORE else self.device[name][shard]

    def _check_source(self, copy: Copy, shard: int, key: bytes, device: int, host: int) -> bool:
        """The bytes that a copy reads are those of the block's key, or known to be rotten. Returns whether good."""
        name = copy.order.pool
        if copy.order.kind is TransferKind.STORE:
            assert device not in self.unwritten[name], "a store of what is still being written"
            assert self.device[name][shard][device] == key, "a store of other bytes"
            return True
        content = self.host[NAMESPACES[name]][shard][host]
        assert content in {key, ("rotten", host)}, "a load of other bytes"
        return content == key

    # --- events -----------------------------------------------------------------------------------------------------

    def settle_shard(self, transfer: TransferId, shard: int, error: str) -> None:
        """One shard of a copy is through: its bytes are where they belong as far as it got, and the cache is told."""
        copy = self.copies[transfer]
        copy.waiting.discard(shard)
        corrupt: list[int] = []
        if not copy.lost:
            target = self._target(copy, shard)
            good = True
            for index, (key, device, host) in enumerate(copy.blocks):
                own = host if copy.order.kind is TransferKind.STORE else device
                assert target[own] == ("copy", transfer), "somebody else used the target of a copy"
                if not self._check_source(copy, shard, key, device, host):
                    corrupt.append(index)
                    self.reported.add((NAMESPACES[copy.order.pool], host))
                good = good and not corrupt and not (error and index % 2)  # a failed copy may have got anywhere
                if good:
                    target[own] = key
        if not copy.waiting:
            del self.copies[transfer]
            self.over.append(transfer)
            self.memory.give_back(transfer)
        self.cache.worker_copies.shard_done(transfer, ShardIndex(shard), error, tuple(corrupt))

    def lose(self, name: str) -> None:
        """The workers of a pool are dead: their copies will fail. The memory stays."""
        for copy in self.copies.values():
            copy.lost = copy.lost or copy.order.pool == name

    def write(self, name: str, slots: Iterable[int], content: Content) -> None:
        """An engine writes whole blocks, on every shard."""
        for slot in slots:
            self.unwritten[name].discard(slot)
            for memory in self.device[name]:
                memory[slot] = content

    def holds(self, name: str, slots: list[int], contents: list[bytes]) -> bool:
        """Whether slots of a device pool have these bytes on every shard."""
        return all([memory.get(slot) for slot in slots] == contents for memory in self.device[name])

    def loads_of(self, name: str) -> list[Copy]:
        """Loads into a pool, those of its lost memory included."""
        return [
            copy for copy in self.copies.values() if (copy.order.pool, copy.order.kind) == (name, TransferKind.LOAD)
        ]

    # --- what is where ----------------------------------------------------------------------------------------------

    def index(self, name: str, place: int) -> dict[bytes, int]:
        """Key to slot, read from the tree of a replica: of its own pool, or of the host pool where `place` is HOST."""
        found: dict[bytes, int] = {}
        for run in self.cache.managed.trees[name].runs():
            found.update(solid_slots(run, place))
        return found

    def expect_hit(self, name: str, chain: list[bytes]) -> tuple[int, int]:
        """How many leading blocks of a chain a pool holds, and how many more the host pool."""
        device, host = self.index(name, self.cache.pools[name].index), self.index(name, HOST)
        here = next((index for index, key in enumerate(chain) if key not in device), len(chain))
        return here, next((index for index, key in enumerate(chain[here:]) if key not in host), len(chain) - here)

    def check_bytes(self) -> None:
        """Whatever an index calls CACHED has the bytes of its key, on every shard."""
        for name, pool in self.cache.pools.items():
            for key, slot in self.index(name, pool.index).items():
                if pool.state_of(slot) is SlotState.CACHED:
                    assert self.holds(name, [slot], [key]), f"pool {name}, slot {slot}"
        for name in ("a", "c"):
            space, pool_of_host = NAMESPACES[name], self.cache.managed.trees[name].host
            assert pool_of_host is not None
            size = pool_of_host.slots_per_slab
            assert pool_of_host.empty == {
                slab for slab in pool_of_host.slabs if pool_of_host.holds(slab * size, size, SlotState.FREE)
            }
            for key, slot in self.index(name, HOST).items():
                if pool_of_host.state_of(slot) is SlotState.CACHED:
                    for memory in self.host[space]:
                        assert memory[slot] in {key, ("rotten", slot)}, f"host slot {slot}"
                    if (space, slot) in self.reported and any(memory[slot] != key for memory in self.host[space]):
                        assert self._is_read(name, slot), f"host slot {slot}, known as rotten, is still in the index"

    def _is_read(self, name: str, slot: int) -> bool:
        tree = self.cache.managed.trees[name]
        return any(each.tree is tree and slot in slots_of(each.host) for each in self.cache.transfers.values())


def solid_slots(run: Run, place: int) -> dict[bytes, int]:
    """Key to slot, of the blocks of a run that one pool has."""
    segment = run.segments[place]
    slots = slots_of(segment.ranges) if segment is not None else []
    return {key: slot for key, slot in zip(keys_in(run.keys), slots, strict=False) if slot >= 0}
