"""Mistakes about what a daemon finds after a restart."""

from __future__ import annotations

import pytest

from kvcached.core.managed import Managed
from kvcached.core.managed_session import ManagedSession
from kvcached.core.restart import restore
from kvcached.core.restart.restore import RestoredCache
from kvcached.core.slots.ranges import Ranges, subtract
from kvcached.core.slots.slots import SlotPool
from kvcached.process.identity import open_process
from kvcached.process.notify import _Outbox
from kvcached.recovery import inheritance, scan
from kvcached.recovery.fd_store import NoticeSocket
from kvcached.recovery.generations import generation_of
from kvcached.service.health import HealthChecks
from kvcached.service.pending import PendingReplies
from kvcached.service.service import Service
from kvcached.service.sessions import EarlierName, EngineGroups
from kvcached.service.state_writer import StateWriter
from kvcached_client.types import FenceSequence
from tests.mutants.mutant import caught_by, rewrite


@caught_by("tests/core/test_restore.py::test_claimed_slots_wait_for_their_owner")
def claims_of_living_engines_ignored(patch: pytest.MonkeyPatch) -> None:
    """Slots that an engine from before the restart may still write are granted to others."""
    rewrite(patch, RestoredCache._fill, "set_aside.extend(ranges)", "pass")


@caught_by("tests/daemon/test_restart.py::test_other_slabs_of_the_same_memory_start_empty[larger slabs]")
def host_pool_of_other_slabs_taken_over(patch: pytest.MonkeyPatch) -> None:
    """Slots are looked for where another block size of slabs would have them."""
    rewrite(
        patch,
        inheritance._recorded_host,
        "(memory.identity, memory.slab_bytes) != (identity, record.slab_bytes)",
        "False",
    )


@caught_by(
    "tests/recovery/test_inheritance.py::"
    "test_smaller_host_pool_is_a_new_one_where_an_engine_writes_behind_its_end[living-3-False]"
)
def claims_in_slabs_that_go_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A pool becomes smaller while an engine writes to one of the slabs that it loses."""
    rewrite(
        patch, inheritance._is_smaller_too_soon, "HostHeaders(before), memory.slabs)", "HostHeaders(before), 1 << 40)"
    )


@caught_by("tests/recovery/test_descriptor_store.py::test_manager_that_takes_nothing_is_waited_for_once")
def stopped_manager_waited_for_each_time(patch: pytest.MonkeyPatch) -> None:
    """A pool of many parts stops the daemon for minutes, because nobody takes them."""
    rewrite(patch, _Outbox.put, "if not is_deaf:", "if True:")


@caught_by("tests/recovery/test_descriptor_store.py::test_what_was_not_sent_is_sent_later_in_order")
def removed_memory_still_sent(patch: pytest.MonkeyPatch) -> None:
    """A manager that reads again keeps memory that the daemon has given up meanwhile."""
    rewrite(patch, _Outbox.put, "self._withdraw(instead_of)", "pass")


@caught_by("tests/recovery/test_notices.py::test_messages_of_others_are_not_believed")
def forged_notification_believed(patch: pytest.MonkeyPatch) -> None:
    """Any process of the same user can take the host pool from the supervisor's store."""
    rewrite(patch, NoticeSocket.messages, "not pid or sender[:2] != (pid, os.geteuid())", "sender[1] != os.geteuid()")


@caught_by("tests/service/test_generations.py::test_generation_goes_on")
def generation_forgotten_at_the_start(patch: pytest.MonkeyPatch) -> None:
    """A daemon starts in a new generation whatever was written down."""
    rewrite(patch, generation_of, "editions.items()", "()")


@caught_by("tests/core/test_declarations.py::test_nothing_is_granted_before_all_is_declared")
def pool_free_before_its_engine_spoke(patch: pytest.MonkeyPatch) -> None:
    """A device pool that outlived the daemon is granted before the engine that writes into it has declared itself."""
    resume = ManagedSession.resume

    def resume_with_all_declared(self: ManagedSession, now_ms: int, fence: FenceSequence) -> None:
        resume(self, now_ms, fence)
        self.declared()
        self.declaring = True

    patch.setattr(ManagedSession, "resume", resume_with_all_declared)


@caught_by("tests/recovery/test_ledger.py::test_another_process_with_the_pid_is_not_taken_for_it")
def process_known_by_its_pid_alone(patch: pytest.MonkeyPatch) -> None:
    """After a restart a stranger with a dead process's pid is taken for it."""
    rewrite(patch, open_process, " or (found is not None and found.started != started)", "")


@caught_by("tests/service/test_rejoin.py::test_only_its_engine_comes_back")
def rejoin_without_its_token(patch: pytest.MonkeyPatch) -> None:
    """Whoever knows the number of an earlier session gets its slots."""
    rewrite(patch, EarlierName.is_shown_by, "hmac.compare_digest(self.token_digest, token_digest)", "True")


@caught_by("tests/service/test_rejoin.py::test_only_the_process_that_came_back_comes_back_again")
def rejoin_of_an_engine_that_is_back(patch: pytest.MonkeyPatch) -> None:
    """Another process with the token of an earlier session takes it from the engine that has rejoined."""
    rewrite(patch, EngineGroups.find_earlier, " and group.scheduler.is_same_process(peer)", "")


@caught_by(
    "tests/service/test_state_writer.py::test_engine_that_may_not_know_of_its_return_is_written_down_by_both_names"
)
def ledger_without_the_name_that_an_engine_knows(patch: pytest.MonkeyPatch) -> None:
    """A daemon dies before an engine has its answer to a rejoin, and the next one does not know the engine."""
    rewrite(patch, StateWriter._session, "group.resumed_as if managed.may_return else None", "None")


@caught_by("tests/core/test_restore.py::test_chains_without_gap_are_found")
def restored_block_behind_a_gap(patch: pytest.MonkeyPatch) -> None:
    """A block is found after a restart though one before it is missing."""
    rewrite(patch, restore._linked, "_followed(parents)[:count] == root", "parents[:count] != lost")


@caught_by("tests/recovery/test_scan.py::test_shards_have_to_agree")
def restored_block_of_different_shards(patch: pytest.MonkeyPatch) -> None:
    """After a restart a block counts although its shards hold different ones."""
    rewrite(patch, scan._good_blocks, "headers[1:]", "()")


@caught_by("tests/recovery/test_scan.py::test_flipped_bit_loses_its_block_only")
def restored_header_without_its_seal(patch: pytest.MonkeyPatch) -> None:
    """After a restart a torn or damaged header counts as a block."""
    rewrite(patch, scan._good_blocks, "good[_sealed(of_shard[good])]", "good")


@caught_by("tests/core/test_device_headers.py::test_header_is_gone_before_its_slot_is_granted")
def header_stays_when_its_slot_is_granted(patch: pytest.MonkeyPatch) -> None:
    """After a restart a slot that was granted to somebody is found as the block that it held before."""
    rewrite(patch, SlotPool.move, "if source is SlotState.CACHED:", "if source is SlotState.ABSENT:")


@caught_by("tests/core/test_device_headers.py::test_header_appears_when_the_fence_has_signalled")
def header_before_its_block_is_written(patch: pytest.MonkeyPatch) -> None:
    """After a restart a block is found that was committed and never written."""
    rewrite(patch, Managed.commit, "elif adopted:", "if adopted:")


@caught_by("tests/service/test_device_headers.py::test_reply_that_grants_comes_after_the_headers")
def header_after_the_reply(patch: pytest.MonkeyPatch) -> None:
    """A slot's header goes after the reply that grants it: a daemon that is killed in between leaves wrong bytes."""
    patch.setattr(Service, "carry_out", lambda self: None)


@caught_by("tests/service/test_device_headers.py::test_late_reply_that_grants_comes_after_the_headers")
def header_after_a_late_reply(patch: pytest.MonkeyPatch) -> None:
    """The same of replies that come later."""
    rewrite(patch, PendingReplies.done, "self._before_reply()", "pass")


@caught_by("tests/service/test_device_headers.py::test_health_check_writes_after_the_headers")
def header_after_a_health_check(patch: pytest.MonkeyPatch) -> None:
    """A health check writes a slot whose header still names a block."""
    rewrite(patch, HealthChecks._exercise, "self._before_probe()", "pass")


@caught_by("tests/core/test_device_headers.py::test_commit_without_an_answer_is_undone")
def block_found_that_its_engine_may_write(patch: pytest.MonkeyPatch) -> None:
    """A block whose commit its engine has not heard of is found, and that engine goes on to write it."""

    def take_back(self: ManagedSession, slots: Ranges[int]) -> bool:
        self.quarantined = subtract(self.quarantined, slots) or self.quarantined
        return True

    patch.setattr(ManagedSession, "set_aside", lambda self, slots, cut_off: True)
    patch.setattr(ManagedSession, "take_back", take_back)


@caught_by("tests/core/test_device_headers.py::test_nothing_is_evicted_before_all_is_declared")
def block_evicted_that_its_engine_reads(patch: pytest.MonkeyPatch) -> None:
    """After a restart a block is evicted before its engine has said that it holds it."""
    rewrite(patch, ManagedSession._await_engine, "pool.freeze()", "pool.thaw()")


@caught_by("tests/daemon/test_sleep.py::test_memory_of_a_sleeping_pool_is_nobodys[daemon]")
def sleeping_pool_gets_memory(patch: pytest.MonkeyPatch) -> None:
    """A daemon that starts makes memory for a pool that sleeps."""
    rewrite(patch, inheritance.inherit, "if each.asleep", "if False")
