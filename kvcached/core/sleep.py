"""A device pool whose memory somebody wants for something else: it is emptied, sleeps, and wakes empty.

Nobody gets a session on a pool that is not awake. What the host pool lacks of its blocks is stored there first, as far
as the write policy stores blocks at all and time allows. When nothing of the pool is in the index, and nobody may touch
a slot of it, `PoolEmptied` asks the world to give the memory back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcached.core.index.tree import PrefixTree
from kvcached.core.managed_session import ManagedSession
from kvcached.core.messages import PoolEmptied
from kvcached.core.refusals import Refusal, Why
from kvcached.core.slots.slots import DevicePool
from kvcached.core.slots.states import PoolState, SlotState
from kvcached.core.transfers.worker_copies import WorkerCopies
from kvcached_client.types import SessionId, WritePolicy

_CAUSE = "the pool falls asleep"


@dataclass(slots=True, eq=False)
class _Falling:
    """A pool that is being emptied.

    Attributes:
        until_ms: what is not stored by then is dropped.
        blocks: that it held when this began.
    """

    tree: PrefixTree
    pool: DevicePool
    until_ms: int
    blocks: int


class Sleeps:
    """Falling asleep and waking of all device pools.

    Args:
        sessions: on device pools.
        worker_copies: their copies.
        pools: by replica name.
        trees: by replica name.

    Attributes:
        version: grows whenever a pool's memory is about to be given back, or is there again.
    """

    def __init__(
        self,
        sessions: Mapping[SessionId, ManagedSession],
        worker_copies: WorkerCopies,
        pools: Mapping[str, DevicePool],
        trees: Mapping[str, PrefixTree],
    ) -> None:
        self.version = 0
        self._sessions = sessions
        self._worker_copies = worker_copies
        self._pools = pools
        self._trees = trees
        self._effects = worker_copies.table.effects
        self._now_ms = 0
        self._falling: list[_Falling] = []

    def is_any_falling(self) -> bool:
        """Whether a pool is being emptied."""
        return bool(self._falling)

    def begin(self, replica: str, until_ms: int) -> None:
        """Empty a pool; `PoolEmptied` follows when nobody has a session on it and no copy of it is under way.

        A pool that falls asleep already goes on doing so.

        Raises:
            Refusal: it is asleep, or is waking.
        """
        pool, tree = self._pools[replica], self._trees[replica]
        if pool.state is PoolState.FALLING_ASLEEP:
            return
        check_awake(pool)
        pool.enter(PoolState.FALLING_ASLEEP)
        pool.resume_stores()
        self._worker_copies.pins.leave(pool)
        self._falling.append(_Falling(tree, pool, until_ms, pool.counts[SlotState.CACHED]))

    def advance(self) -> None:
        """Go on with what is being emptied, and finish what nothing holds any more."""
        for falling in self._falling[:]:
            pool = falling.pool
            is_held = any(session.pool is pool for session in self._sessions.values())
            if is_held or self._is_storing(falling) or self._worker_copies.table.of_pool(pool):
                continue
            self._falling.remove(falling)
            before = _blocks(falling.tree)
            if pool.evictable:
                falling.tree.evict(pool.evictable, pool.index, _CAUSE)
            pool.forget_unstored()
            self._effects.append(PoolEmptied(pool.name, falling.blocks, before - _blocks(falling.tree)))

    def tick(self, now_ms: int) -> None:
        """Time has passed."""
        self._now_ms = now_ms

    def asleep(self, replica: str) -> None:
        """Nothing uses a pool's memory any more, which is given back now; or making it anew has failed."""
        pool = self._pools[replica]
        pool.enter(PoolState.ASLEEP)
        pool.doubts.forget()
        self.version += 1

    def wake(self, replica: str) -> None:
        """A pool's memory is being made.

        Raises:
            Refusal: it is not asleep.
        """
        pool = self._pools[replica]
        if pool.state is not PoolState.ASLEEP:
            raise Refusal(Why.POOL_NOT_ASLEEP, replica=pool.name, state=pool.state)
        pool.enter(PoolState.WAKING)
        pool.restore_workers()

    def awake(self, replica: str) -> None:
        """A pool has its memory and its workers."""
        pool = self._pools[replica]
        pool.enter(PoolState.AWAKE)
        self.version += 1

    def _is_storing(self, falling: _Falling) -> bool:
        """Store what the host pool lacks, and drop what it holds; whether time may bring more of that."""
        tree, pool = falling.tree, falling.pool
        is_over = self._now_ms >= falling.until_ms or pool.paused
        if is_over or tree.host is None or tree.write_policy is WritePolicy.NEVER or not pool.counts[SlotState.CACHED]:
            return False
        table = self._worker_copies.table
        if not (pool.failed_stores or table.of_pool(pool)):
            pool.resume_stores()  # the host pool may have room now for what it has refused
        if pool.copies:
            self._worker_copies.stores.empty(tree, pool)
        is_copied = any(each.tree is tree for each in table.worker.values())
        return bool(pool.counts[SlotState.CACHED]) and (is_copied or not pool.copies or pool.stores_paused)


def _blocks(tree: PrefixTree) -> int:
    return sum(run.length for run in tree.runs())


def check_awake(pool: DevicePool) -> None:
    """Refuse what needs the memory of a pool that does not have it, or is about to give it back."""
    if pool.state is not PoolState.AWAKE:
        raise Refusal(Why.POOL_ASLEEP, replica=pool.name, state=pool.state)
