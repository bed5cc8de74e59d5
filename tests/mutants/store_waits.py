"""Mistakes about waits for blocks that another engine is storing."""

from __future__ import annotations

import pytest

from kvcached.core.transfers.prefetch import Prefetches
from kvcached.core.transfers.store_waits import store_behind
from kvcached.service.storage_verbs import StorageVerbs
from kvcached_client.vllm.daemon.client import Fetches
from kvcached_client.vllm.daemon.thread import DaemonThread
from kvcached_client.vllm.scheduling.request_state import RequestState
from kvcached_client.vllm.scheduling.scheduler import SchedulerSide
from kvcached_client.vllm.scheduling.store_queue import StoreQueue
from tests.mutants.mutant import caught_by, rewrite

_CONNECTOR = "tests/vllm_connector/test_store_waits.py::"


@caught_by("tests/core/test_store_waits.py::test_nobody_waits_for_their_own_store")
def engine_waits_for_its_own_store(patch: pytest.MonkeyPatch) -> None:
    """An engine waits for a store that it has to make itself."""
    rewrite(patch, store_behind, " or store.id in own", "")


@caught_by("tests/core/test_store_waits.py::test_wait_ends_with_the_last_session_that_asked[MembersDied]")
def wait_for_a_store_outlives_who_asked(patch: pytest.MonkeyPatch) -> None:
    """A wait for the store of an engine that hangs goes on when nobody is left who wants it."""
    rewrite(patch, Prefetches.look_again, "not self._locks.is_wanted(prefetch.id)", "False")


@caught_by("tests/core/test_store_waits.py::test_wait_for_an_engine_that_hangs_ends")
def wait_for_a_store_has_no_end(patch: pytest.MonkeyPatch) -> None:
    """A store of an engine that hangs is waited for as long as it hangs."""
    rewrite(patch, Prefetches.look_again, "self._ticked_ms >= prefetch.wait_until_ms", "False")


@caught_by("tests/core/test_store_waits.py::test_waits_leave_storage_to_others")
def waits_keep_others_from_storage(patch: pytest.MonkeyPatch) -> None:
    """Prefetches that wait for stores count against those that ask storage."""
    rewrite(patch, Prefetches.begin, "self.waiting if is_stored else self._asking()", "self.under_way")


@caught_by("tests/service/test_store_waits.py::test_nobody_waits_longer_than_it_takes_to_compute")
def wait_for_a_store_as_long_as_it_takes(patch: pytest.MonkeyPatch) -> None:
    """A request waits for the store of an engine that hangs, though it could have computed the blocks."""
    rewrite(patch, StorageVerbs._patience_ms, "_store_patience_ms(request, prefetch)", "request.deadline_ms")


@caught_by(_CONNECTOR + "test_seek_waits_again_as_long_as_that_brings_something")
def vllm_waits_in_vain_again_and_again(patch: pytest.MonkeyPatch) -> None:
    """A request of vLLM waits for a store as often as it is told of one."""
    rewrite(patch, Fetches.are_wanted, "hold.hit > self._hits.get(seek.ticket, -1)", "True")


@caught_by(_CONNECTOR + "test_seek_waits_for_a_store_and_acquires_again")
def vllm_keeps_the_lease_of_the_short_hit(patch: pytest.MonkeyPatch) -> None:
    """A request that waits keeps its lease, and gets the same again afterwards."""
    rewrite(patch, DaemonThread._begin_fetch, "hold is not None", "False")


@caught_by(_CONNECTOR + "test_prefill_for_another_engine_is_offered_at_once")
def vllm_gathers_offers_of_prefills(patch: pytest.MonkeyPatch) -> None:
    """The blocks of a prefill for another engine wait for those of other requests."""
    rewrite(patch, StoreQueue._offer, "tracked.is_prefill", "False")


@caught_by(_CONNECTOR + "test_nobody_waits_for_the_offers_of_an_embedding")
def vllm_waits_for_the_offers_of_embeddings(patch: pytest.MonkeyPatch) -> None:
    """Each request for an embedding is taken for a prefill for another engine."""
    rewrite(patch, RequestState.is_prefill, " and self.request.pooling_params is None", "")


@caught_by(_CONNECTOR + "test_prefill_for_another_engine_ends_when_its_offers_are_planned")
def vllm_answers_a_prefill_before_its_last_offer(patch: pytest.MonkeyPatch) -> None:
    """The response of a prefill leaves while its last blocks are not offered."""
    rewrite(patch, SchedulerSide.finished, "tracked.is_prefill", "False")
