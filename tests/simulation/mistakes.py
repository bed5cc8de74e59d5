"""Deliberate mistakes in the product, each of which the simulation has to find."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest

from kvcached.core import cache as core_cache
from kvcached.core.cache import Cache
from kvcached.core.index.tree import PrefixTree
from kvcached.core.managed_session import ManagedSession
from kvcached.core.restart.rejoin import Rejoin
from kvcached.core.slots.ranges import no_ranges
from kvcached.core.slots.slots import DevicePool
from kvcached.core.slots.states import SessionState, SlotState
from kvcached.core.transfers.engine_copies import EngineCopies
from kvcached.core.transfers.stores import Stores
from kvcached.core.transfers.transfer import EngineTransfer
from kvcached.core.transfers.worker_copies import WorkerCopies
from kvcached.memory.host_pool import HostHeaders
from kvcached.recovery import takeover
from kvcached.service import state_writer
from kvcached.service.admin.clear import Clear
from kvcached.service.admin.clears import Clears
from kvcached.service.admin.verbs import AdminVerbs
from kvcached.service.admission import Admission
from kvcached.service.kept_answers import KeptAnswers
from kvcached.service.known_prompts import KnownPrompts
from kvcached.service.pending import PendingReplies
from kvcached.service.replica import NamedNamespace
from kvcached.service.service import Service
from kvcached.service.sessions import EngineGroup, EngineGroups
from kvcached_client.types import KEY_SIZE_BYTES, NO_FENCE, ShardIndex, TransferId
from tests.simulation.mistake import Mistake
from tests.simulation.sleep_mistakes import SLEEP_MISTAKES
from tests.simulation.storage_mistakes import STORAGE_MISTAKES
from tests.simulation.store_wait_mistakes import STORE_WAIT_MISTAKES


def _pool_given_away(patch: pytest.MonkeyPatch) -> None:
    """An expired session's pool goes to whoever asks, though its processes live."""

    def replaced(self: Admission, replica: str, *_: object) -> ManagedSession | None:
        sessions = [each for each in self._cache.managed.sessions.values() if each.pool.name == replica]
        return sessions[0] if sessions and sessions[0].state is SessionState.EXPIRED else None

    patch.setattr(Admission, "_replaced_session", replaced)


def _quarantine_skipped(patch: pytest.MonkeyPatch) -> None:
    """Host slots that an expired engine's shards are writing are free at once."""
    true_end = EngineCopies.end

    def end(self: EngineCopies, session: Any, copy: EngineTransfer, *_: SlotState) -> None:
        true_end(self, session, copy)

    patch.setattr(EngineCopies, "end", end)


def _retry_executed_twice(patch: pytest.MonkeyPatch) -> None:
    """No answer is kept."""
    patch.setattr(KeptAnswers, "find", lambda *_: None)


def _one_shard_counts_for_all(patch: pytest.MonkeyPatch) -> None:
    """A copy by workers is over with its first acknowledgement."""
    settle = WorkerCopies.shard_done

    def shard_done(self: WorkerCopies, transfer: TransferId, shard: ShardIndex, *report: Any) -> None:
        if (found := self.table.worker.get(transfer)) is not None:
            found.waiting = {shard}
        settle(self, transfer, shard, *report)

    patch.setattr(WorkerCopies, "shard_done", shard_done)


def _one_offload_shard_counts_for_all(patch: pytest.MonkeyPatch) -> None:
    """A copy by an engine is over with its first acknowledgement."""

    def settled(self: EngineCopies, exchange: EngineTransfer, shard: int, error: str) -> bool:
        exchange.failure = exchange.failure or error
        exchange.waiting.clear()
        return True

    patch.setattr(EngineCopies, "settled", settled)


def _failed_store_believed(patch: pytest.MonkeyPatch) -> None:
    """What a shard says of a copy that failed is not heard."""
    settled = EngineCopies.settled

    def believe(self: EngineCopies, exchange: EngineTransfer, shard: int, error: str) -> bool:
        return settled(self, exchange, shard, "" if shard >= 0 else error)

    patch.setattr(EngineCopies, "settled", believe)


def _one_death_ends_copies(patch: pytest.MonkeyPatch) -> None:
    """A worker's death ends the copies of its fellows, whose own deaths nobody has confirmed."""

    def on_worker_died(self: Cache, pool: Any) -> None:
        pool.healthy = False
        self.counters["workers_lost"] += 1
        for transfer in self.worker_copies.table.of_pool(pool):
            transfer.failure = transfer.failure or "a worker is dead"
            self.worker_copies._end(transfer)

    patch.setattr(Cache, "_on_worker_died", on_worker_died)


def _blocks_lost_with_a_worker(patch: pytest.MonkeyPatch) -> None:
    """A worker's death takes the blocks along that its pool has cached."""
    on_worker_died = Cache._on_worker_died

    def forget(self: Cache, pool: Any) -> None:
        on_worker_died(self, pool)
        self.clearings.begin(self.tree_of(pool.name), self.tree_of(pool.name).namespace)

    patch.setattr(Cache, "_on_worker_died", forget)


def _fence_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """Blocks are stored while they are still written."""
    patch.setattr(Stores, "_unsignalled", lambda *_: None)


def _reply_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Who waits in a session that is over is not told."""
    patch.setattr(PendingReplies, "session_over", lambda *_: None)


def _one_death_counts_for_all(patch: pytest.MonkeyPatch) -> None:
    """Where one process of a session is dead, nobody asks for the others."""
    patch.setattr(EngineGroup, "living", lambda *_, **__: [])


def _late_tick_expires(patch: pytest.MonkeyPatch) -> None:
    """After the daemon has stood still it takes everybody for silent."""
    patch.setattr(core_cache, "LATE_TICK_DIVISOR", 1e-6)


def _claims_not_written(patch: pytest.MonkeyPatch) -> None:
    """Nothing beside the host slots tells the next daemon who may be writing them."""
    patch.setattr(HostHeaders, "claim", lambda *_: None)


def _engine_of_before_forgotten(patch: pytest.MonkeyPatch) -> None:
    """After a restart nobody asks whether engines of before live."""
    patch.setattr(takeover, "_living", lambda *_, **__: [])


def _pause_that_ended_holds(patch: pytest.MonkeyPatch) -> None:
    """A pause of everything is said to hold, though that of one replica was ended meanwhile."""
    is_paused = Cache.is_paused
    patch.setattr(Cache, "is_paused", lambda cache, replica="": is_paused(cache, replica) or not replica)


def _paused_copies_start(patch: pytest.MonkeyPatch) -> None:
    """A pause only waits for the copies under way."""
    patch.setattr(DevicePool, "copies", property(lambda pool: pool.healthy and not pool.clearing))


def _leases_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """A drain waits for copies, and not for what is held."""
    left = AdminVerbs.left
    patch.setattr(AdminVerbs, "left", lambda verbs: left(verbs)._replace(leases=0))


def _renewal_not_written(patch: pytest.MonkeyPatch) -> None:
    """The ledger always names the first generation of a namespace."""
    record = state_writer._replica
    patch.setattr(state_writer, "_replica", lambda *about: msgspec.structs.replace(record(*about), generation=0))


def _cleared_in_name_only(patch: pytest.MonkeyPatch) -> None:
    """The namespace of engines that people clear is written down with a new generation, and goes on in the old one."""

    def of_engines(self: Clears, target: NamedNamespace) -> Clear:
        generation = self._cache.generations.renew(target.root)
        return self._done(Clear((), generation, "", target.root, target.label, 0))

    patch.setattr(Clears, "_of_engines", of_engines)


def _cleared_blocks_stay(patch: pytest.MonkeyPatch) -> None:
    """The host copies of a namespace that is cleared stay in the index."""
    patch.setattr(PrefixTree, "shed_host", lambda *_, **__: None)


def _own_slots_not_taken_back(patch: pytest.MonkeyPatch) -> None:
    """Of a lease that is declared only the blocks count, and not the slots that it is to write yet."""
    declare: Any = Rejoin.declare

    def without_own(self: Rejoin, *asked: Any) -> Any:
        *first, _ = asked
        return declare(self, *first, no_ranges())

    patch.setattr(Rejoin, "declare", without_own)


def _taken_over_late(patch: pytest.MonkeyPatch) -> None:
    """Events reach a daemon that does not yet know what it has taken over."""
    take_in = Service.take_in

    def take_in_later(self: Service, *taken: Any) -> None:
        self._pending._later(0.05, partial(take_in, self, *taken))

    patch.setattr(Service, "take_in", take_in_later)


def _queued_work_forgotten(patch: pytest.MonkeyPatch) -> None:
    """An engine that comes back is believed at once, whatever it has queued."""
    resume = ManagedSession.resume
    patch.setattr(ManagedSession, "resume", lambda session, now_ms, _: resume(session, now_ms, NO_FENCE))


def _ended_session_goes_on(patch: pytest.MonkeyPatch) -> None:
    """After a restart a session goes on that had expired before."""
    patch.setattr(EngineGroups, "end", lambda *_: None)


def _known_prompts_mixed_up(patch: pytest.MonkeyPatch) -> None:
    """Of the prompts that a session has acquired, any of the right length is taken for the one that is continued."""

    def whole(self: KnownPrompts, known: int, frame: bytes) -> bytes:
        end = known * KEY_SIZE_BYTES
        before = next((keys for keys in reversed(self._keys.values()) if len(keys) == end), frame[:KEY_SIZE_BYTES])
        return before + frame[KEY_SIZE_BYTES:] if known else frame

    patch.setattr(KnownPrompts, "whole", whole)


MISTAKES = [
    Mistake("pool given away", _pool_given_away, (7, 4)),
    Mistake("quarantine skipped", _quarantine_skipped, (80, 88)),
    Mistake("retry executed twice", _retry_executed_twice, (1, 0)),
    Mistake("one shard counts for all", _one_shard_counts_for_all, (1,)),
    Mistake("one shard of an engine counts for all", _one_offload_shard_counts_for_all, (0, 2)),
    Mistake("failed store believed", _failed_store_believed, (6,)),
    Mistake("one worker's death ends copies", _one_death_ends_copies, (15, 57)),
    Mistake("blocks lost with a worker", _blocks_lost_with_a_worker, (3,)),
    Mistake("fence not waited for", _fence_not_waited_for, (5, 13)),
    Mistake("reply forgotten", _reply_forgotten, (71, 153), sleeps=True),
    Mistake("one death counts for all", _one_death_counts_for_all, (4, 7)),
    Mistake("late tick expires sessions", _late_tick_expires, (2, 3)),
    Mistake("claims not written", _claims_not_written, (105, 110)),
    Mistake("engine of before forgotten", _engine_of_before_forgotten, (40, 45)),
    Mistake("pause that ended holds", _pause_that_ended_holds, (217,)),
    Mistake("paused copies start", _paused_copies_start, (1, 5)),
    Mistake("leases not waited for", _leases_not_waited_for, (1, 4)),
    Mistake("renewal not written down", _renewal_not_written, (51, 62)),
    Mistake("cleared in name only", _cleared_in_name_only, (4, 11), reboots=True),
    Mistake("cleared blocks stay", _cleared_blocks_stay, (0, 3)),
    Mistake("taken over late", _taken_over_late, (9, 11)),
    Mistake("own slots not taken back", _own_slots_not_taken_back, (1, 5)),
    Mistake("queued work forgotten", _queued_work_forgotten, (325, 339)),
    Mistake("ended session goes on", _ended_session_goes_on, (31, 44)),
    Mistake("known prompts mixed up", _known_prompts_mixed_up, (1, 3)),
    *SLEEP_MISTAKES,
    *STORAGE_MISTAKES,
    *STORE_WAIT_MISTAKES,
]
