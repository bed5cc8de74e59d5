"""Deliberate mistakes in the product, each of which the simulation has to find."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvcached import admin_verbs, books, takeover
from kvcached.admin_verbs import AdminVerbs
from kvcached.admission import Admission
from kvcached.answers import KeptAnswers
from kvcached.core import cache as core_cache
from kvcached.core.attached_state import Exchange
from kvcached.core.declarations import Declarations
from kvcached.core.exchanges import Exchanges
from kvcached.core.pauses import is_paused
from kvcached.core.pool import DevicePool
from kvcached.core.ranges import no_ranges
from kvcached.core.session import Session
from kvcached.core.states import SessionState, SlotState
from kvcached.core.stores import Stores
from kvcached.core.tiers import Tiers
from kvcached.core.transfer import Transfer
from kvcached.core.tree import PrefixTree
from kvcached.deferred import DeferredAnswers
from kvcached.membership import Group
from kvcached.worker.host_memory import HostHeaders
from tests.simulation.mistake import Mistake
from tests.simulation.storage_mistakes import STORAGE_MISTAKES


def _pool_given_away(patch: pytest.MonkeyPatch) -> None:
    """An expired session's pool goes to whoever asks, though its processes live."""

    def replaced(self: Admission, replica: str, *_: object) -> Session | None:
        sessions = [each for each in self._cache.sessions.values() if each.pool.name == replica]
        return sessions[0] if sessions and sessions[0].state is SessionState.EXPIRED else None

    patch.setattr(Admission, "_replaced_session", replaced)


def _quarantine_skipped(patch: pytest.MonkeyPatch) -> None:
    """Host slots that an expired engine's shards are writing are free at once."""
    drop = Exchanges.drop_store

    def drop_store(self: Exchanges, session: Any, store: Exchange, target: SlotState) -> None:
        drop(self, session, store, SlotState.FREE)

    patch.setattr(Exchanges, "drop_store", drop_store)


def _retry_executed_twice(patch: pytest.MonkeyPatch) -> None:
    """No answer is kept."""
    patch.setattr(KeptAnswers, "find", lambda *_: None)


def _one_shard_counts_for_all(patch: pytest.MonkeyPatch) -> None:
    """A copy by workers is over with its first acknowledgement."""
    settle = Tiers.on_shard_settled

    def on_shard_settled(self: Tiers, event: Any) -> None:
        transfer = self.book.transfers.get(event.transfer)
        if transfer is not None:
            transfer.waiting = {event.shard}
        settle(self, event)

    patch.setattr(Tiers, "on_shard_settled", on_shard_settled)


def _one_attached_shard_counts_for_all(patch: pytest.MonkeyPatch) -> None:
    """A copy by an engine is over with its first acknowledgement."""

    def settled(self: Exchanges, exchange: Exchange, shard: int, error: str) -> bool:
        exchange.failure = exchange.failure or error
        exchange.waiting.clear()
        return True

    patch.setattr(Exchanges, "settled", settled)


def _failed_store_believed(patch: pytest.MonkeyPatch) -> None:
    """What a shard says of a copy that failed is not heard."""
    settled = Exchanges.settled

    def believe(self: Exchanges, exchange: Exchange, shard: int, error: str) -> bool:
        return settled(self, exchange, shard, "" if shard >= 0 else error)

    patch.setattr(Exchanges, "settled", believe)


def _epoch_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    """Copies of a pool's lost memory count for the new one."""
    patch.setattr(Transfer, "is_current", property(lambda _: True))


def _fence_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """Blocks are stored while they are still written."""
    patch.setattr(Stores, "_unsignalled", lambda *_: None)


def _reply_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Who waits in a session that is over is not told."""
    patch.setattr(DeferredAnswers, "session_changed", lambda *_: None)


def _one_death_counts_for_all(patch: pytest.MonkeyPatch) -> None:
    """Where one process of a session is dead, nobody asks for the others."""
    patch.setattr(Group, "living", lambda *_, **__: [])


def _late_tick_expires(patch: pytest.MonkeyPatch) -> None:
    """After the daemon has stood still it takes everybody for silent."""
    patch.setattr(core_cache, "LATE_TICK_DIVISOR", 1e-6)


def _claims_not_written(patch: pytest.MonkeyPatch) -> None:
    """Nothing beside the host slots tells the next daemon who may be writing them."""
    patch.setattr(HostHeaders, "claim", lambda *_: None)


def _engine_of_before_forgotten(patch: pytest.MonkeyPatch) -> None:
    """After a restart nobody asks whether engines of before live."""
    patch.setattr(takeover, "_living", lambda _: [])


def _pause_that_ended_holds(patch: pytest.MonkeyPatch) -> None:
    """A pause of everything is said to hold, though that of one replica was ended meanwhile."""
    patch.setattr(admin_verbs, "is_paused", lambda cache, replica="": is_paused(cache, replica) or not replica)


def _paused_copies_start(patch: pytest.MonkeyPatch) -> None:
    """A pause only waits for the copies under way."""
    patch.setattr(DevicePool, "copies", property(lambda pool: pool.healthy and not pool.clearing))


def _leases_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """A drain waits for copies, and not for what is held."""
    left = AdminVerbs.left
    patch.setattr(AdminVerbs, "left", lambda verbs: left(verbs)._replace(leases=0))


def _renewal_not_written(patch: pytest.MonkeyPatch) -> None:
    """The ledger always names the first generation of a namespace."""
    record = books._replica
    patch.setattr(books, "_replica", lambda *about: msgspec.structs.replace(record(*about), generation=0))


def _cleared_blocks_stay(patch: pytest.MonkeyPatch) -> None:
    """The host copies of a namespace that is cleared stay in the index."""
    patch.setattr(PrefixTree, "shed_host", lambda *_, **__: None)


def _own_slots_not_taken_back(patch: pytest.MonkeyPatch) -> None:
    """Of a lease that is declared only the blocks count, and not the slots that it is to write yet."""
    declare: Any = Declarations.declare

    def without_own(self: Declarations, *asked: Any) -> Any:
        *first, _, fence = asked
        return declare(self, *first, no_ranges(), fence)

    patch.setattr(Declarations, "declare", without_own)


MISTAKES = [
    Mistake("pool given away", _pool_given_away, (7, 4)),
    Mistake("quarantine skipped", _quarantine_skipped, (47, 22)),
    Mistake("retry executed twice", _retry_executed_twice, (1, 0)),
    Mistake("one shard counts for all", _one_shard_counts_for_all, (1, 2)),
    Mistake("one shard of an engine counts for all", _one_attached_shard_counts_for_all, (0, 2)),
    Mistake("failed store believed", _failed_store_believed, (0, 6)),
    Mistake("epoch not looked at", _epoch_not_looked_at, (3, 2)),
    Mistake("fence not waited for", _fence_not_waited_for, (28, 32)),
    Mistake("reply forgotten", _reply_forgotten, (20, 6)),
    Mistake("one death counts for all", _one_death_counts_for_all, (10, 27)),
    Mistake("late tick expires sessions", _late_tick_expires, (9, 7)),
    Mistake("claims not written", _claims_not_written, (49, 38)),
    Mistake("engine of before forgotten", _engine_of_before_forgotten, (10, 27)),
    Mistake("pause that ended holds", _pause_that_ended_holds, (166, 141)),
    Mistake("paused copies start", _paused_copies_start, (3, 4)),
    Mistake("leases not waited for", _leases_not_waited_for, (3, 2)),
    Mistake("renewal not written down", _renewal_not_written, (23, 2)),
    Mistake("cleared blocks stay", _cleared_blocks_stay, (1, 2)),
    Mistake("own slots not taken back", _own_slots_not_taken_back, (10, 0)),
    *STORAGE_MISTAKES,
]
