"""Who plays: engines in offload mode alone, or beside engines on device pools that share the slabs."""

from __future__ import annotations

from collections import Counter

from kvcached.core.cache import Cache
from kvcached.core.insight.invariants import check
from kvcached.core.namespaces import NamespaceSpec
from kvcached.core.slots.ranges import slot_count
from tests.core.history import Choose, History, Operation
from tests.core.model import KEPT_PERCENT, TENANT_QUOTA, TTL_MS, chain_keys
from tests.core.offload_engine import let_rest
from tests.core.offload_model import SPACES_MAX, OffloadPlayers
from tests.core.offload_world import SPECS
from tests.core.slab_memory import SlabMemory
from tests.core.tier_accounts import Accounts
from tests.core.tier_model import TierDriver
from tests.core.tier_world import SHARDS


class OffloadDriver(History):
    """Engines in offload mode alone. Time passes for them."""

    def __init__(self, choose: Choose) -> None:
        super().__init__(choose)
        self.slabs = (3, 4, 6)[choose(3)]
        self.cache = Cache(
            [], epoch=7, session_ttl_ms=TTL_MS, host_slabs=self.slabs, namespaces_max=SPACES_MAX, announces=True,
            host_quota=TENANT_QUOTA,
        )  # fmt: skip
        self.players = OffloadPlayers(choose, self.cache, SlabMemory(SHARDS))
        self.weighted = [*self.players.weighted, (self.players.tick, 6), (self.players.heartbeat, 20)]

    def do(self, operation: Operation) -> None:
        """Do it, and check everything."""
        self.done[operation.__name__] += 1
        self.players.begin()
        operation()
        self.cache.effects.clear()
        assert check(self.cache) == []
        self.players.check(alone=True)

    def _kept(self, spec: NamespaceSpec) -> int:
        """Blocks that the floor of a tenant may keep, when its namespace has every slab."""
        tenants, slots = (
            self.cache.offload.namespaces.by_root[spec.root].tree.tenants,
            self.slabs * spec.host_slots_per_slab,
        )
        return 0 if tenants is None else min(tenants.blocks["kept"], slots * KEPT_PERCENT // 100)

    def end(self) -> None:
        """Everybody dies, and rests: nothing is held, and whoever comes then can have every slab."""
        self.players.end(self.do)
        let_rest(self.cache)
        assert self.players.memory.held_units == 0
        core, spec = self.cache.offload, SPECS[self.choose(len(SPECS))]
        session = self.cache.open_offload(spec, self.players.now_ms).id
        lease = core.acquire(session, "all", b"", 0, full=True)
        blocks = self.slabs * spec.host_slots_per_slab
        kept = self._kept(spec)
        plan = core.prepare_store(session, lease.id, 0, b"".join(chain_keys((7,) * (blocks + 1))))
        assert blocks - kept <= slot_count(plan.slots) == plan.depth <= blocks
        assert check(self.cache) == []

    def seen(self) -> Counter[str]:
        """What was counted: by the cache, here, and of the engines."""
        return super().seen() + self.players.done


class MixedDriver(TierDriver):
    """Engines on three device pools, and others in offload mode, on the same slabs."""

    def __init__(self, choose: Choose) -> None:
        super().__init__(choose, namespaces_max=SPACES_MAX)
        self.players = OffloadPlayers(choose, self.cache, self.world.memory)
        of_players = self.players.accounts
        self.accounts = Accounts(self.cache, self.world, lambda: of_players.due["loaded_blocks"])
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

    def seen(self) -> Counter[str]:
        """What was counted: by the cache, here, and of the engines."""
        return super().seen() + self.players.done
