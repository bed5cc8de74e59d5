"""Mistakes of batches of calls."""

from __future__ import annotations

import pytest

from kvcached_client import batch, lease
from kvcached_client.client import Client
from kvcached_client.lease_steps import LeaseSteps
from kvcached_client.transport import steps
from kvcached_client.transport.channel import Channel
from kvcached_client.transport.session import SessionChannel
from tests.mutants.mutant import caught_by, rewrite


@caught_by("tests/client/test_batch.py::test_only_so_many_calls_wait_at_the_same_time")
def batch_without_bound(patch: pytest.MonkeyPatch) -> None:
    """More calls are under way than the daemon keeps answers for: their repetition is another call."""
    patch.setattr(batch, "CALLS_UNDER_WAY_MAX", 1 << 30)


@caught_by("tests/client/test_batch.py::test_calls_of_one_lease_wait_for_each_other")
def calls_of_a_lease_overtake_each_other(patch: pytest.MonkeyPatch) -> None:
    """A commit starts from a depth that the commit before it has not reached yet."""
    rewrite(patch, LeaseSteps._await_last, "self._last_begun.wait()", "pass")


@caught_by("tests/client/test_batch.py::test_forked_child_leaves_the_replies_to_its_parent")
def forked_child_takes_replies(patch: pytest.MonkeyPatch) -> None:
    """A child that is forked inside a batch reads from its parent's connection."""
    rewrite(patch, Channel._receive_reply, "self._check_process()\n", "")


@caught_by("tests/client/test_batch.py::test_chain_may_grow_before_the_lease_is_there")
def output_counted_as_prompt(patch: pytest.MonkeyPatch) -> None:
    """Output that joined the chain while its acquire was under way is findable, though its policy says otherwise."""
    rewrite(
        patch,
        lease.acquiring,
        "return make(channel, chain, cacheable_blocks, grant",
        "return make(channel, chain, chain.token_count // chain.block_size, grant",
    )


@caught_by("tests/client/test_batch.py::test_lease_that_nobody_can_take_any_more_is_given_back")
def dropped_acquire_keeps_its_lease(patch: pytest.MonkeyPatch) -> None:
    """The slots of an acquire that nobody takes any more are lost until the session ends."""
    rewrite(patch, SessionChannel.asking, "self.abandon(request)\n", "")


@caught_by("tests/client/test_posted.py::test_only_so_many_replies_are_awaited")
def posted_calls_without_bound(patch: pytest.MonkeyPatch) -> None:
    """An engine that is faster than its daemon has any number of requests under way."""
    patch.setattr(steps, "CALLS_UNDER_WAY_MAX", 1 << 30)


@caught_by("tests/client/test_posted.py::test_replies_are_taken_by_later_calls")
def posted_replies_are_left(patch: pytest.MonkeyPatch) -> None:
    """The replies to posted calls pile up until somebody settles."""
    rewrite(patch, SessionChannel._send_request, "self.posted.collect(self.has_come)", "pass")


@caught_by("tests/client/test_posted.py::test_refusal_is_logged_raised_by_settle_once_and_loses_no_slot[Release]")
def refused_finish_keeps_its_slots(patch: pytest.MonkeyPatch) -> None:
    """A posted finish that is refused leaves slots with a lease that nobody has any more."""
    rewrite(patch, LeaseSteps.finishing, "if gives_back:", "if False:")


@caught_by("tests/daemon/test_rejoin.py::test_rejoin_takes_the_answers_that_have_come")
def lease_with_a_call_under_way_is_declared(patch: pytest.MonkeyPatch) -> None:
    """A commit that a dead daemon has answered is not declared: nobody finds its blocks until the next call."""
    rewrite(patch, LeaseSteps.declaration, "self._await_last()\n", "")


@caught_by("tests/daemon/test_rejoin.py::test_unheard_release_is_not_declared")
def lease_with_an_unheard_release_is_declared(patch: pytest.MonkeyPatch) -> None:
    """A lease whose release came too late is declared, with slots to which others have written since."""
    rewrite(patch, LeaseSteps.declaration, "if self._is_release_unheard:", "if False:")


@caught_by("tests/daemon/test_rejoin.py::test_rejoin_ends_the_calls_of_an_open_batch")
def rejoin_in_the_middle_of_a_batch(patch: pytest.MonkeyPatch) -> None:
    """Slots that an acquire takes from the reserve after the reserve was declared belong to two leases."""
    rewrite(patch, Client.rejoin, "batch.wait()", "pass")
