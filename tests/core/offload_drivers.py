"""Who plays: engines in offload mode alone, or beside engines on device pools that share the slabs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, MutableMapping

from kvcached.core.cache import Cache
from kvcached.core.insight.invariants import check
from kvcached.core.messages import StartTransfer, TransferKind
from kvcached.core.slots.ranges import slot_count
from kvcached_client.types import TransferId
from tests.core.model import TTL_MS, Choose, chain_keys
from tests.core.offload_engine import let_rest
from tests.core.offload_memory import SlabMemory, SlotView
from tests.core.offload_model import SPACES_MAX, OffloadPlayers
from tests.core.offload_world import SPECS
from tests.core.tier_accounts import Accounts
from tests.core.tier_model import TierDriver
from tests.core.tier_world import NAMESPACES, SHARDS, Content, World, slots_of

Operation = Callable[[], None]


class OffloadDriver:
    """Engines in offload mode alone. Time passes for them."""

    def __init__(self, choose: Choose) -> None:
        self.choose = choose
        self.slabs = (3, 4, 6)[choose(3)]
        self.cache = Cache([], epoch=7, session_ttl_ms=TTL_MS, host_slabs=self.slabs, namespaces_max=SPACES_MAX)
        self.players = OffloadPlayers(choose, self.cache, SlabMemory(SHARDS))
        self.weighted = [*self.players.weighted, (self.players.tick, 6), (self.players.heartbeat, 20)]

    def step(self) -> None:
        """Do one random operation."""
        self.do(chosen(self.weighted, self.choose))

    def do(self, operation: Operation) -> None:
        """Do it, and check everything."""
        self.players.done[operation.__name__] += 1
        self.players.begin()
        operation()
        self.cache.effects.clear()
        assert check(self.cache) == []
        self.players.check(alone=True)

    def end(self) -> None:
        """Everybody dies, and rests: nothing is held, and whoever comes then can have every slab."""
        self.players.end(self.do)
        let_rest(self.cache)
        assert self.players.memory.held_units == 0
        core, spec = self.cache.offload, SPECS[self.choose(len(SPECS))]
        session = self.cache.open_offload(spec, self.players.now_ms).id
        lease = core.acquire(session, "all", b"", 0, full=True)
        blocks = self.slabs * spec.host_slots_per_slab
        plan = core.prepare_store(session, lease.id, 0, b"".join(chain_keys((7,) * (blocks + 1))))
        assert slot_count(plan.slots) == plan.depth == blocks
        assert check(self.cache) == []


class SharedWorld(World):
    """Workers whose host memory is that of engines in offload mode, too."""

    def __init__(self, cache: Cache, memory: SlabMemory, per_slab: int) -> None:
        super().__init__(cache)
        self.memory, self.per_slab = memory, per_slab
        self.host = {space: [self._view(shard) for shard in range(SHARDS)] for space in NAMESPACES.values()}

    def _view(self, shard: int) -> MutableMapping[int, Content]:
        return SlotView(self.memory, shard, self.per_slab)

    def _start(self, order: StartTransfer) -> None:
        slots = [slot for span in order.spans for slot in slots_of(span.host)]
        self.memory.hold(order.transfer, self.per_slab, slots, writes=order.kind is TransferKind.STORE)
        super()._start(order)

    def settle_shard(self, transfer: TransferId, shard: int, error: str) -> None:
        """As ever; the last one gives the slots back."""
        if self.copies[transfer].waiting == {shard}:
            self.memory.give_back(transfer)
        super().settle_shard(transfer, shard, error)


class SharedAccounts(Accounts):
    """Books of the tiers beside engines in offload mode, whose loads go to no device pool."""

    def __init__(self, cache: Cache, world: World, players: OffloadPlayers) -> None:
        self.players = players
        super().__init__(cache, world)

    def grown(self) -> Counter[str]:
        """What the step has counted for the tiers."""
        return super().grown() - Counter(loaded_blocks=self.players.accounts.due["loaded_blocks"])


class MixedDriver(TierDriver):
    """Engines on three device pools, and others in offload mode, on the same slabs."""

    def __init__(self, choose: Choose) -> None:
        super().__init__(choose, namespaces_max=SPACES_MAX)
        host = self.cache.trees[0].host
        assert host is not None
        memory = SlabMemory(SHARDS)
        self.world = SharedWorld(self.cache, memory, host.slots_per_slab)
        self.players = OffloadPlayers(choose, self.cache, memory)
        self.accounts = SharedAccounts(self.cache, self.world, self.players)
        self.weighted += self.players.weighted

    def do(self, operation: Operation) -> None:
        """Do it, and check everything of both."""
        self.players.begin()
        super().do(operation)
        self.players.check(alone=False)

    def end(self) -> None:
        """Everybody leaves: nothing is held."""
        self.players.end(self.do)
        super().end()
        assert self.players.memory.held_units == 0


def chosen(weighted: list[tuple[Operation, int]], choose: Choose) -> Operation:
    """One of them, each as often as its weight says."""
    index = choose(sum(weight for _, weight in weighted))
    for operation, weight in weighted:
        if index < weight:
            return operation
        index -= weight
    raise AssertionError("no weight is left")
