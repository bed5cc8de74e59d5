"""Mistakes of the connector for vLLM."""

from __future__ import annotations

import pytest

from kvcached_client.blocks.pages import EnginePages
from kvcached_client.copy_process.shards import Shards
from kvcached_client.engines import weights
from kvcached_client.engines.weights import WeightReader
from kvcached_client.vllm import interface, settings
from kvcached_client.vllm.scheduling.announcements import Announcements
from kvcached_client.vllm.scheduling.scheduler import SchedulerSide
from kvcached_client.vllm.scheduling.store_queue import StoreQueue
from kvcached_client.vllm.scheduling.stores import PendingStore, Stores
from kvcached_client.vllm.scheduling.wishes import _Found
from kvcached_client.vllm.worker import WorkerSide
from tests.mutants.mutant import caught_by, rewrite


@caught_by("tests/vllm_connector/test_worker.py::test_copies_begin_behind_the_mark_of_their_step")
def vllm_copies_before_the_kernels_of_their_step(patch: pytest.MonkeyPatch) -> None:
    """The connector's copies on a device are ordered behind none of vLLM's kernels."""
    rewrite(patch, WorkerSide.begin, "self._marked() if orders.loads or orders.stores else None", "None")


@caught_by("tests/vllm_connector/test_worker.py::test_sleep_waits_for_the_copy_under_way")
def vllm_sleeps_under_a_copy(patch: pytest.MonkeyPatch) -> None:
    """Memory is taken away while it is copied, and what was ordered before sleep is copied after it."""
    rewrite(patch, WorkerSide.fall_asleep, "if not self._is_idle.wait(CLOSE_S_MAX):", "if False:")


@caught_by("tests/vllm_connector/test_worker.py::test_nothing_is_copied_asleep")
def vllm_copies_asleep(patch: pytest.MonkeyPatch) -> None:
    """Orders are carried out on memory that has been taken away."""
    rewrite(patch, WorkerSide._copy, "None if self._is_asleep else self._shard_of", "self._shard_of")


@caught_by("tests/vllm_connector/test_stores.py::test_idle_engine_lets_no_offer_wait")
def vllm_offers_wait_for_others_that_will_not_come(patch: pytest.MonkeyPatch) -> None:
    """An engine that has nothing to compute takes empty steps until its offers have waited long enough."""
    rewrite(patch, SchedulerSide.step, "self._link.hurry()", "pass")


@caught_by("tests/vllm_connector/test_preemption.py::test_lease_that_comes_with_a_preemption_stores_nothing")
def vllm_blocks_that_others_have_by_now_are_offered(patch: pytest.MonkeyPatch) -> None:
    """A lease that comes in the step of a preemption stores what another request computes."""
    rewrite(patch, StoreQueue.advance, " or tracked.is_preempted", "")


@caught_by("tests/vllm_connector/test_preemption.py::test_plan_that_comes_with_a_preemption_stores_no_earlier_blocks")
def vllm_earlier_blocks_that_others_have_by_now_are_stored(patch: pytest.MonkeyPatch) -> None:
    """A plan that comes in the step of a preemption stores what another request computes."""
    patch.setattr(PendingStore, "is_current", property(lambda store: store.tracked.preemptions == store.preemptions))


@caught_by("tests/vllm_connector/test_store_limits.py::test_blocks_that_wait_for_an_offer_count_as_held")
def vllm_offers_wait_though_much_is_held(patch: pytest.MonkeyPatch) -> None:
    """Offers wait for others while blocks of other requests cannot be held, and are not stored."""
    rewrite(patch, StoreQueue._watch_held, "self._stores.is_half_full", "False")


@caught_by("tests/vllm_connector/test_worker.py::test_stores_of_two_sessions_do_not_go_together")
def vllm_store_of_the_next_session_copied_with_the_last(patch: pytest.MonkeyPatch) -> None:
    """A worker copies stores of two sessions into the memory of the first."""
    rewrite(patch, WorkerSide._next_stores, "following.order.session == order.session", "True")


@caught_by("tests/cuda/test_vllm_worker.py::test_process_that_was_killed_before_the_session_is_replaced")
def vllm_takes_a_killed_process_for_a_broken_device(patch: pytest.MonkeyPatch) -> None:
    """Once somebody has killed a copy process that waits for a session, a thread copies for ever."""
    rewrite(patch, Shards.join, "prepared.was_killed", "False")


_ABORTED = "tests/vllm_connector/test_worker.py::test_copies_that_may_never_end_are_aborted"


@caught_by(_ABORTED)
def vllm_waits_for_marks_of_a_failed_device(patch: pytest.MonkeyPatch) -> None:
    """A copy behind a mark that is never reached goes on for ever, though the device is known to have failed."""
    rewrite(patch, WorkerSide._marked, "self._shards.abort()", "pass")


@caught_by(_ABORTED)
def vllm_ends_before_its_copies(patch: pytest.MonkeyPatch) -> None:
    """VLLM ends while a process of its still waits for a mark."""
    rewrite(patch, WorkerSide.close, "self._shards.abort()", "pass")


@caught_by("tests/vllm_connector/test_identity.py::test_weights_count")
def weights_known_by_their_size(patch: pytest.MonkeyPatch) -> None:
    """Two fine-tunes, whose files have the same sizes, share blocks."""
    rewrite(patch, WeightReader._read, "hasher.update(piece[:size])", "hasher.update(bytes(size))")


@caught_by("tests/vllm_connector/test_identity.py::test_files_that_changed_after_the_load")
def weights_of_the_next_download_taken_for_those_in_memory(patch: pytest.MonkeyPatch) -> None:
    """Files that were replaced after vLLM had loaded the model count as what it loaded."""
    rewrite(patch, weights._check_state, "_state_of(status) != file.state", "False")


@caught_by("tests/client/test_weights.py::test_files_that_just_changed_are_not_remembered")
def digest_remembered_of_a_file_that_may_still_change(patch: pytest.MonkeyPatch) -> None:
    """A change within the resolution of a file's times is never noticed."""
    rewrite(patch, WeightReader._read, "began_ns - file.state.changed >= SETTLED_S * 1e9", "True")


@caught_by("tests/vllm_connector/test_store_limits.py::test_earlier_blocks_count_towards_the_share")
def earlier_blocks_held_beyond_the_share(patch: pytest.MonkeyPatch) -> None:
    """Blocks that the daemon lost and asks for again are held, however many of vLLM's blocks that takes."""
    rewrite(patch, Stores._blocks_of, "len(earlier) > self.room", "False")


@caught_by("tests/vllm_connector/test_wishes.py::test_prompt_is_pinned_once_it_is_stored")
def prompt_pinned_before_it_is_stored(patch: pytest.MonkeyPatch) -> None:
    """A pin is set while the blocks that it should keep are still copied, and keeps none of them."""
    rewrite(patch, StoreQueue._pin_stored, "not self._stores.has_any_of(tracked)", "True")


@caught_by("tests/vllm_connector/test_wishes.py::test_what_cannot_be_executed_is_refused")
def unknown_wish_ignored(patch: pytest.MonkeyPatch) -> None:
    """What a request asks for in vain is not reported."""
    rewrite(patch, _Found.add, "self._refused.setdefault(name, str(why))", "pass")


@caught_by("tests/vllm_connector/test_announcements.py::test_a_reply_from_before_the_store_removes_nothing")
def blocks_removed_by_an_old_reply(patch: pytest.MonkeyPatch) -> None:
    """A reply that is older than a store tells listeners that the stored blocks are gone."""
    rewrite(patch, Announcements.found, "self._known.get(each, ticket) < ticket", "each in self._known")


@caught_by("tests/vllm_connector/test_interface.py::test_every_difference_is_named")
def changed_parameters_of_a_hook_unnoticed(patch: pytest.MonkeyPatch) -> None:
    """A newer vLLM that calls a hook with other parameters is used."""
    rewrite(patch, interface.hook_differences, "given != taken", "False")


@caught_by(
    "tests/vllm_connector/test_stores.py::test_what_another_connector_loads_is_stored_by_nobody_before_it_has_come"
)
def load_of_another_connector_taken_for_computed(patch: pytest.MonkeyPatch) -> None:
    """A request that ends while another connector loads stores blocks that nobody has written."""
    rewrite(patch, SchedulerSide.finished, "request.num_computed_tokens if has_begun else 0", "10**6")


@caught_by("tests/vllm_connector/test_settings.py::test_states_and_heads_of_a_draft_are_each_ranks_own")
def states_taken_for_the_same_on_all_ranks(patch: pytest.MonkeyPatch) -> None:
    """Each rank stores a share of the states, and loads those of the others."""
    rewrite(patch, settings.is_replicated, "and not has_states", "")


@caught_by("tests/client/test_engine_pages.py::test_fingerprint_tells_how_many_rows_a_block_has")
def rows_of_a_block_not_told_apart(patch: pytest.MonkeyPatch) -> None:
    """Engines whose kernels divide a block otherwise share its bytes."""
    rewrite(patch, EnginePages.of_tensors, "shape, strides, part.dtype", "shape[-3:], strides[-3:], part.dtype")
