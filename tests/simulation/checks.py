"""What must be true after everything that happens to the daemon."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvcached.core.cache import Cache
from kvcached.core.index.host_tree import HOST
from kvcached.core.insight.invariants import check
from kvcached.core.managed_session import ManagedSession
from kvcached.core.slots.slots import DevicePool
from kvcached.core.slots.states import SessionState, SlotState
from kvcached.recovery import recorder
from kvcached.service import state_writer
from kvcached.storage import client as link
from tests.core.tier_world import solid_slots
from tests.simulation.memory import Shape, suspects_of
from tests.simulation.scheduler import Broken

if TYPE_CHECKING:
    from tests.simulation.daemon import Daemon
    from tests.simulation.world import World

#: Bytes of the whole index are compared after every so many events of the daemon.
_BYTES_EVERY = 8
#: States that nothing may be in once everybody has left.
_HELD = (SlotState.LEASED, SlotState.FENCED, SlotState.FILLING, SlotState.QUARANTINED)


class Tripwire(logging.Handler):
    """Errors that the product logs instead of raising them: no peer may cause any.

    That storage fails is none of them.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.caught: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name in {link.__name__, recorder.__name__, state_writer.__name__} and not record.exc_info:
            return
        words = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            words += "\n" + "".join(traceback.format_exception(record.exc_info[1]))
        self.caught.append(words)

    @contextmanager
    def stretched(self) -> Iterator[None]:
        """Watch the product's loggers."""
        logger = logging.getLogger("kvcached")
        before = logger.propagate, logger.level, logger.disabled
        logger.addHandler(self)
        logger.propagate, logger.level, logger.disabled = False, logging.ERROR, False
        try:
            yield
        finally:
            logger.removeHandler(self)
            logger.propagate, logger.level, logger.disabled = before


class Checks:
    """Looks at one daemon."""

    def __init__(self, world: World, daemon: Daemon) -> None:
        self._world = world
        self._daemon = daemon
        self._looks = 0
        self._state: object = None

    def look(self) -> None:
        """Everything that can be seen in one moment, unless it is what was seen last.

        Raises:
            Broken: something is wrong.
        """
        cache = self._daemon.cache
        if self._world.tripwire.caught:
            raise Broken(self._world.tripwire.caught[0])
        self._daemon.pins.look()
        self._daemon.policies.look()
        self._daemon.prefetches.look()
        self._daemon.store_waits.look()
        self._look_at_generations(cache)
        state = _state(cache)
        if state == self._state:
            return
        self._state = state
        if violations := check(cache):
            raise Broken("; ".join(violations[:5]))
        self._look_at_epochs(cache)
        self._daemon.sleeps.look()
        over = (
            each
            for each in cache.managed.sessions.values()
            if each.state is SessionState.EXPIRED and not each.declaring
        )
        self._world.over.update(self._world.holder(cache.epoch, session.id) for session in over)
        self._daemon.promises.look()
        self._note(cache)
        self._looks += 1
        if self._looks % _BYTES_EVERY == 0:
            self.look_at_bytes()

    def _look_at_generations(self, cache: Cache) -> None:
        world, replicas = self._world, self._daemon.service._replicas.values()
        self._daemon.promises.note(replicas)
        for replica in replicas:
            world.begins(world.plan.replicas[replica.name], replica.generation)
        for root, space in cache.offload.namespaces.by_root.items():
            world.begins(root, space.generation)

    def _look_at_epochs(self, cache: Cache) -> None:
        now = {name: pool.epoch for name, pool in cache.pools.items()}
        now.update({root.hex(): space.generation for root, space in cache.offload.namespaces.by_root.items()})
        for name, number in now.items():
            if number < self._world.epochs.get(name, 0):
                raise Broken(f"the epoch of {name} went from {self._world.epochs[name]} to {number}")
        self._world.epochs.update(now)

    def look_at_returned(self, session: ManagedSession) -> None:
        """A session from before a restart goes on: what its engine has queued is waited for.

        Raises:
            Broken: it is not.
        """
        self.look_at_bytes()
        free = {slot for slot in range(session.pool.slots) if session.pool.state_of(slot) is SlotState.FREE}
        for shard in self._daemon.workers[session.pool.name].shards:
            holder = self._world.holder(self._daemon.cache.epoch, session.id)
            if early := {slot for slot in free if shard.memory.is_claimed(holder, shard.memory.block(slot))}:
                raise Broken(f"slots {early} are free, and {holder} has work queued on them")

    def _note(self, cache: Cache) -> None:
        """Count states that are rare."""
        seen = self._world.seen
        hosts = [tree.host for tree in cache.trees if tree.host is not None]
        for pool in (*cache.pools.values(), *hosts):
            for state in _HELD:
                seen[f"events with {state.name} slots in {pool.name}"] += bool(pool.counts[state])
        seen["events with a retired tree"] += bool(cache.offload.namespaces.retired)

    def look_at_bytes(self) -> None:
        """What the index calls CACHED has the bytes of its key on every shard, but for what is being written yet."""
        cache, world = self._daemon.cache, self._world
        for name, pool in cache.pools.items():
            tree = cache.managed.trees[name]
            shape, generation = world.shapes[tree.namespace], world.roots[tree.namespace]
            suspects = suspects_of(cache, tree, pool)
            for run in tree.runs():
                for key, slot in solid_slots(run, pool.index).items():
                    if pool.state_of(slot) is SlotState.CACHED:
                        self._look_at_device(name, shape, generation, key, slot, is_suspect=slot in suspects)
            self._look_at_headers(name, pool, suspects)
        hosts = {id(tree): (tree, world.roots[tree.namespace]) for tree in cache.managed.trees.values()}
        for space in cache.offload.namespaces.by_root.values():
            hosts[id(space.tree)] = space.tree, space.generation
        for tree, generation in hosts.values():
            for run in tree.runs():
                for key, slot in solid_slots(run, HOST).items():
                    if tree.host is not None and tree.host.state_of(slot) is SlotState.CACHED:
                        self._look_at_host(world.shapes[tree.namespace], generation, key, slot)

    def _look_at_headers(self, name: str, pool: DevicePool, suspects: set[int]) -> None:
        """The headers of a pool name the blocks whose bytes are all there, and no others."""
        memories = self._daemon.workers[name].memories
        named = set(memories[0].headers.table.named_rows().tolist()) if memories else set()
        cached = {slot for slot in range(pool.slots) if pool.state_of(slot) is SlotState.CACHED}
        if named != cached - suspects:
            raise Broken(f"headers of {name} name {named}, cached are {cached}, without {suspects}")

    def _look_at_device(
        self, name: str, shape: Shape, generation: int, key: bytes, slot: int, *, is_suspect: bool
    ) -> None:
        for shard in self._daemon.workers[name].shards:
            span = shard.memory.block(slot)
            if slot in shard.memory.unwritten and is_suspect:
                continue
            if shard.memory.read(span) != shape.expected(generation, key, shard.index):
                raise Broken(f"{shard.memory.name}: slot {slot} has other bytes than those of {key.hex()}")

    def _look_at_host(self, shape: Shape, generation: int, key: bytes, slot: int) -> None:
        host = self._world.host
        for shard in range(shape.geometry.shards):
            span = shape.block(slot, shard)
            if not host.is_rotten(span) and host.read(span) != shape.expected(generation, key, shard):
                raise Broken(f"host slot {slot}, shard {shard}, has other bytes than those of {key.hex()}")

    def look_at_the_end(self) -> None:
        """Everybody has left, and nothing is held."""
        self.look()
        self.look_at_bytes()
        daemon, cache, service = self._daemon, self._daemon.cache, self._daemon.service
        hosts = [tree.host for tree in cache.trees if tree.host is not None]
        pools = [*cache.pools.values(), *hosts]
        left = {
            "sessions": len(cache.managed.sessions) + len(cache.offload.sessions),
            "copies by workers": len(cache.transfers),
            "copies by engines": len(cache.offload.transfers),
            "pinned blocks": sum(pool.protected for pool in pools),
            "slots held": sum(pool.counts[state] for pool in pools for state in _HELD),
            "orphaned slots": sum(pool.orphaned for pool in cache.pools.values()),
            "retired trees": len(cache.offload.namespaces.retired),
            "requests without a reply": len(daemon.unanswered),
            "processes watched": len(daemon.watched),
            "groups": len(service._groups._by_session) + len(service._groups._of_connection),
            "member tokens": len(service._groups._candidates),
            "pending replies": len(service._pending._replies),
            "shapes": len(service._offload_admission._hellos),
            "pins": len(cache.pins._pins),
            "prefix locks": len(cache.storage.locks),
            **daemon.storage.left(),
        }
        if any(left.values()):
            raise Broken(f"something is held that nobody holds: { {what: n for what, n in left.items() if n} }")


def _state(cache: Cache) -> object:
    """Differs where slots, pins, uses, copies or sessions do."""
    hosts = [tree.host for tree in cache.trees if tree.host is not None]
    return (
        [(pool.counts[:], pool.protected, pool.clock) for pool in (*cache.pools.values(), *hosts)],
        [(number, transfer.state, len(transfer.waiting)) for number, transfer in cache.transfers.items()],
        [(exchange.id, len(exchange.waiting)) for exchange in cache.offload.transfers],
        [(session.id, session.state, len(session.leases)) for session in cache.managed.sessions.values()],
        [(session.id, session.state, len(session.leases)) for session in cache.offload.sessions.values()],
        [pool.epoch for pool in cache.pools.values()],
        [space.generation for space in cache.offload.namespaces.by_root.values()],
        [copy.id for copy in cache.storage.copies],
    )


def effect_of_requests(cache: Cache) -> tuple[object, ...]:
    """What a request changes that is served, and nothing else does at the same time."""
    counted = ("sessions_opened", "acquires", "releases", "committed_blocks", "duplicate_blocks", "cleared_blocks")
    return (
        *(cache.counters[name] for name in counted),
        *(pool.counts[SlotState.LEASED] for pool in cache.pools.values()),
        *(len(session.leases) for session in cache.managed.sessions.values()),
        *(len(session.leases) for session in cache.offload.sessions.values()),
        len(cache.offload.transfers),
    )
