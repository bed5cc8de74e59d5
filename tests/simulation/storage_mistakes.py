"""Deliberate mistakes about storage, write policies and pins."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvcached.core.cache import Cache
from kvcached.core.index.host_tree import HOST
from kvcached.core.index.tree import PrefixTree
from kvcached.core.messages import ForgetStored, StorageLost
from kvcached.core.pins import Pins
from kvcached.core.slots.host_slots import HostPool
from kvcached.core.slots.ranges import one_range
from kvcached.core.slots.states import SlotState
from kvcached.core.transfers import stores
from kvcached.core.transfers.prefix_locks import PrefixLocks
from kvcached.core.transfers.storage_copies import Backups
from kvcached.core.transfers.storage_state import PrefetchEnd
from kvcached.recovery import generations
from kvcached.recovery.recorder import Recorder
from kvcached.service import state_writer
from kvcached.service.pending import Answer, PendingReplies, PendingReply
from kvcached.service.storage_verbs import StorageVerbs
from kvcached.storage.client import StorageLink
from kvcached_client.types import WritePolicy
from tests.simulation.mistake import Mistake


def _lost_before_dead(patch: pytest.MonkeyPatch) -> None:
    """Copies of storage that is too slow end at once, though its process lives and goes on with them."""
    suspend = StorageLink._suspend

    def suspend_and_lose(self: StorageLink, why: str) -> None:
        suspend(self, why)
        self._tell(StorageLost())

    patch.setattr(StorageLink, "_suspend", suspend_and_lose)


def _backups_not_pinned(patch: pytest.MonkeyPatch) -> None:
    """What storage reads may be evicted."""
    start, end = Backups._start, Backups.end

    def start_unpinned(self: Backups, candidate: Any) -> bool:
        before = set(self._table.backups)
        is_started = start(self, candidate)
        for number in self._table.backups.keys() - before:
            copy = self._table.backups[number]
            copy.tree.unlock_host(copy.run, copy.end)
        return is_started

    def end_unpinned(self: Backups, copy: Any, *about: int) -> None:
        copy.tree.lock(copy.tree.resolve(copy.run, copy.end), copy.end, HOST)
        end(self, copy, *about)

    patch.setattr(Backups, "_start", start_unpinned)
    patch.setattr(Backups, "end", end_unpinned)


def _generations_share_blocks(patch: pytest.MonkeyPatch) -> None:
    """What storage has of a namespace before it is cleared stays, and is found under the same name after that."""
    format_of, carry_out = StorageVerbs.format_of, StorageVerbs.carry_out

    def format_of_any(self: StorageVerbs, namespace: bytes, generation: int) -> Any:
        found = format_of(self, namespace, generation)
        return None if found is None else msgspec.structs.replace(found, generation=0)

    def carry_out_nothing_forgotten(self: StorageVerbs, effect: Any) -> None:
        if not isinstance(effect, ForgetStored):
            carry_out(self, effect)

    patch.setattr(StorageVerbs, "format_of", format_of_any)
    patch.setattr(StorageVerbs, "carry_out", carry_out_nothing_forgotten)


def _answer_lost_with_storage(patch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a prefetch is not told that storage has gone."""
    done = PendingReplies.done

    def done_unless_lost(self: PendingReplies, reply: PendingReply, answer: Answer) -> None:
        if getattr(answer.header, "reason", "") == str(PrefetchEnd.UNAVAILABLE):
            reply.respond = lambda _: None
        done(self, reply, answer)

    patch.setattr(PendingReplies, "done", done_unless_lost)


def _policy_not_written(patch: pytest.MonkeyPatch) -> None:
    """The ledger always names the policies that are configured."""
    replica = state_writer._replica

    def configured(*about: Any) -> Any:
        record = replica(*about)
        return msgspec.structs.replace(record, write_policy=record.configured_policy)

    patch.setattr(state_writer, "_replica", configured)


def _tails_copied_under_never(patch: pytest.MonkeyPatch) -> None:
    """What is about to leave a device is copied under every policy."""
    patch.setattr(stores, "_STORE_TAILS", frozenset(WritePolicy))


def _pin_outlives_its_time(patch: pytest.MonkeyPatch) -> None:
    """Pins end when somebody ends them."""
    patch.setattr(Pins, "tick", lambda *_: None)


def _pin_ends_early(patch: pytest.MonkeyPatch) -> None:
    """A pin's time is counted from the last tick before it."""
    pin = Pins.pin

    def pin_shorter(self: Pins, tree: Any, pool: Any, keys: bytes, until_ms: int) -> Any:
        return pin(self, tree, pool, keys, until_ms - 200)

    patch.setattr(Pins, "pin", pin_shorter)


def _prefix_not_kept(patch: pytest.MonkeyPatch) -> None:
    """A prefetch makes room as any store does: the prefix that it continues may be what is evicted."""
    reserve: Any = PrefixTree.reserve_host

    def reserve_anywhere(self: PrefixTree, count: int, cause: str, *, keep: Any = None, **others: Any) -> Any:
        return reserve(self, count, cause, keep=None if cause.startswith("prefetch") else keep, **others)

    patch.setattr(PrefixLocks, "extend", lambda *_: None)
    patch.setattr(PrefixTree, "reserve_host", reserve_anywhere)


def _lock_outlives_its_session(patch: pytest.MonkeyPatch) -> None:
    """A prefix is locked for an engine that is dead."""
    patch.setattr(PrefixLocks, "leave", lambda *_: None)


def _generations_begin_at_0_again(patch: pytest.MonkeyPatch) -> None:
    """Generations are counted from 0 wherever there is no ledger, whatever storage remembers."""
    editions_of = generations.editions_of
    patch.setattr(generations, "first_of", lambda *_: 0)
    patch.setattr(generations, "editions_of", lambda _, ledger: editions_of(None, ledger))


def _clear_told_before_it_is_recorded(patch: pytest.MonkeyPatch) -> None:
    """A clear is answered while the record of generations is on its way to the device."""
    patch.setattr(Recorder, "holds", lambda *_: True)


def _weights_not_recorded(patch: pytest.MonkeyPatch) -> None:
    """The record of generations says nothing of weights."""
    record = Recorder._record

    def without_weights(self: Recorder, contents: Any) -> Any:
        whole = record(self, contents)
        editions = tuple(msgspec.structs.replace(each, weights_version="") for each in whole.editions)
        return msgspec.structs.replace(whole, editions=editions)

    patch.setattr(Recorder, "_record", without_weights)


def _held_slab_taken(patch: pytest.MonkeyPatch) -> None:
    """A namespace has to give slabs though slots of them are read or written."""

    def take(self: Cache, host: HostPool, count: int) -> int:
        for slab in sorted(host.slabs - host.empty)[:count]:
            first, size = slab * host.slots_per_slab, host.slots_per_slab
            for slot in range(first, first + size):
                state = host.state_of(slot)
                if state is not SlotState.FREE:
                    host.move(one_range(slot, 1), state, SlotState.FREE, "taken")
        return min(count, len(host.empty))

    patch.setattr(Cache, "_evict_slabs", take)


STORAGE_MISTAKES = [
    Mistake("storage is lost before it is dead", _lost_before_dead, (6, 11)),
    Mistake("backups not pinned", _backups_not_pinned, (2, 0)),
    Mistake("generations share blocks", _generations_share_blocks, (0, 19)),
    Mistake("answer lost with storage", _answer_lost_with_storage, (2, 7)),
    Mistake("policy not written down", _policy_not_written, (56, 89)),
    Mistake("tails copied under never", _tails_copied_under_never, (30, 37)),
    Mistake("pin outlives its time", _pin_outlives_its_time, (4, 3)),
    Mistake("pin ends early", _pin_ends_early, (0, 1)),
    Mistake("prefix of a prefetch not kept", _prefix_not_kept, (2, 87)),
    Mistake("held slab taken", _held_slab_taken, (6, 56)),
    Mistake("lock outlives its session", _lock_outlives_its_session, (8, 10)),
    Mistake("generations begin at 0 again", _generations_begin_at_0_again, (2, 3), reboots=True),
    Mistake("clear told before it is recorded", _clear_told_before_it_is_recorded, (10, 45), reboots=True),
    Mistake("weights not recorded", _weights_not_recorded, (0, 1), reboots=True),
]
