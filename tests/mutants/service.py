"""Mistakes of the service: which requests are served, who is answered, and when."""

from __future__ import annotations

import pytest

from kvcached.service.admin.clears import Clears
from kvcached.service.admission import Admission
from kvcached.service.engine_verbs import EngineVerbs
from kvcached.service.known_prompts import KnownPrompts
from kvcached.service.offload.admission import OffloadAdmission
from kvcached.service.pending import PendingReplies
from kvcached.service.service import Service
from kvcached.service.sessions import EngineGroups
from kvcached.service.sleep_verbs import SleepVerbs
from kvcached.service.state_writer import HostClaims
from tests.mutants.mutant import caught_by, rewrite


@caught_by("tests/service/test_drain.py::test_drain_refuses_new_work_and_lets_the_rest_go_on")
def lease_granted_while_draining(patch: pytest.MonkeyPatch) -> None:
    """A daemon that drains grants new leases."""
    rewrite(patch, EngineVerbs._acquire, "self._drain_state.check()", "pass")


@caught_by("tests/service/test_state_writer.py::test_clear_is_durable_before_its_reply")
def ledger_behind_the_replies(patch: pytest.MonkeyPatch) -> None:
    """What a successor has to know is not written before the reply that tells of it."""
    rewrite(patch, Service.carry_out, "self.state_writer.keep()", "pass")


@caught_by("tests/service/test_removals.py::test_next_daemon_does_not_find_what_was_removed")
def removed_blocks_in_headers(patch: pytest.MonkeyPatch) -> None:
    """The next daemon finds blocks in the host pool that were removed on request."""
    rewrite(patch, HostClaims.forget, "self._headers.forget(found[is_free], geometry)", "pass")


@caught_by("tests/service/test_service.py::test_bye_while_shards_live_frees_nothing_yet")
def quarantine_after_a_goodbye_skipped(patch: pytest.MonkeyPatch) -> None:
    """A scheduler's goodbye frees what its living shard processes may still write."""
    rewrite(patch, EngineVerbs._bye, "group.others()", "False")


@caught_by("tests/service/test_service.py::test_expiry_is_told_and_ends_with_the_process")
def reply_to_a_refusal_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A request that is refused gets no reply."""
    rewrite(patch, Service.submit, "Answer(wire.error_reply(request.id, self.refused(error)))", "None")


@caught_by("tests/service/test_drain.py::test_closing_answers_engines_that_wait")
def waiting_request_dropped_at_the_end(patch: pytest.MonkeyPatch) -> None:
    """Requests that wait when the daemon ends get no reply."""
    patch.setattr(PendingReplies, "close", lambda *_: None)


@caught_by("tests/service/test_clears.py::test_clear_of_an_idle_replica_is_answered_at_once")
def workers_keep_the_old_generation(patch: pytest.MonkeyPatch) -> None:
    """Workers write the old generation into headers after a clear."""
    rewrite(patch, Clears.finish, "replica.workers.generation = clear.generation", "pass")


@caught_by("tests/service/test_known_prompts.py::test_only_the_same_prompt_is_continued")
def prompt_of_another_length_continued(patch: pytest.MonkeyPatch) -> None:
    """A prompt that was remembered is continued at another block than its last."""
    rewrite(patch, KnownPrompts.whole, " or len(keys) != known * KEY_SIZE_BYTES", "")


@caught_by("tests/service/test_known_prompts.py::test_prompt_of_an_acquire_without_effect_is_not_remembered")
def refused_prompt_remembered(patch: pytest.MonkeyPatch) -> None:
    """A prompt is remembered before it is known whether its acquire is granted."""
    rewrite(
        patch,
        EngineVerbs._acquire,
        "answer = self._acquire_keys",
        "group.prompts.keep(keys); answer = self._acquire_keys",
    )


@caught_by("tests/service/test_known_prompts.py::test_memory_is_bounded_and_prompts_in_use_stay")
def continued_prompt_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """That a prompt was continued does not count as a use of it."""
    rewrite(patch, KnownPrompts.keep, "if known:", "if False:")


@caught_by("tests/service/test_sleep.py::test_ledger_says_asleep_before_the_memory_goes_and_awake_when_it_is_there")
def memory_given_back_before_the_record(patch: pytest.MonkeyPatch) -> None:
    """The memory of a pool goes before the state file says that the pool sleeps."""
    rewrite(patch, SleepVerbs._on_workers_ended, "self._carry_out()", "pass")


@caught_by("tests/service/test_sleep.py::test_sleep_is_answered_when_the_memory_is_given_back")
def sleep_answered_too_early(patch: pytest.MonkeyPatch) -> None:
    """A sleep is answered while the memory is being given back."""
    rewrite(patch, SleepVerbs._slept, " or name in self._giving_back", "")


@caught_by("tests/access/test_admission.py::test_session_is_opened_on_an_allowed_replica_only")
def replica_not_checked(patch: pytest.MonkeyPatch) -> None:
    """An engine opens a session on a replica that its user may not use."""
    rewrite(patch, Admission.hello, "peer.grants.check_replica(replica.name)", "pass")


@caught_by("tests/access/test_admission.py::test_memory_of_another_replicas_session_is_not_handed_out")
def replica_of_a_joining_process_not_checked(patch: pytest.MonkeyPatch) -> None:
    """Whoever has a session's token gets its memory."""
    rewrite(patch, Admission.join, "peer.grants.check_replica(replica.name)", "pass")


@caught_by("tests/access/test_admission.py::test_namespace_is_used_under_an_allowed_label_only")
def namespace_not_checked(patch: pytest.MonkeyPatch) -> None:
    """An engine in offload mode uses a namespace that its user may not use."""
    rewrite(
        patch,
        OffloadAdmission.hello,
        "peer.grants.check_namespace(request.label, *self._known_labels(spec))",
        "pass",
    )


@caught_by("tests/access/test_admission.py::test_namespace_of_others_is_not_used_under_an_own_label")
def label_of_a_known_namespace_not_checked(patch: pytest.MonkeyPatch) -> None:
    """An engine uses the namespace of others by declaring it under a label of its own."""
    patch.setattr(OffloadAdmission, "_known_labels", lambda *_: [])


@caught_by("tests/service/test_known_prompts.py::test_sessions_share_one_memory")
def earlier_sessions_keep_their_larger_part(patch: pytest.MonkeyPatch) -> None:
    """Sessions that come one after the other remember more prompts together than all may."""
    rewrite(patch, EngineGroups._new, "each.prompts.trim()", "pass")
