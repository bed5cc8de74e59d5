"""Seeks that wait until blocks have come from storage, and what goes on meanwhile."""

from __future__ import annotations

import pytest

from kvcached_client.errors import KvcachedError
from kvcached_client.offload import Hold
from kvcached_client.prefetch import PrefetchResult
from kvcached_client.types import LeaseId, TransferId
from kvcached_client.vllm.daemon.client import FETCH_MS_MAX, FETCHES_MAX, UNAVAILABLE_S
from kvcached_client.vllm.daemon.commands import (
    Connected,
    DropLoad,
    Event,
    Fetching,
    Found,
    Lost,
    NotFound,
    Planned,
    Seek,
)
from tests.vllm_connector.link_rig import (
    EXPIRED,
    FETCHED,
    GONE,
    LOAD,
    PLAN,
    REFUSED,
    SLOW,
    UNAVAILABLE,
    ScriptedClient,
    connected,
    fetching_rig,
    offer,
    seek,
)
from tests.vllm_connector.link_rig import Rig as LinkRig
from tests.vllm_connector.rig import BLOCK, Rig

__all__ = ["fetching_rig"]

WAITS = FETCH_MS_MAX / 1000
HIT = Hold(LeaseId(5), 2)


def begun(rig: LinkRig, client: ScriptedClient, *tickets: int) -> None:
    """Have seeks wait for storage."""
    for ticket in tickets:
        assert rig.link.submit(seek(ticket))
    assert rig.wait(len(tickets)) == [Fetching(ticket, WAITS) for ticket in tickets]
    client.await_calls(len(tickets))


def found(ticket: int = 1, session: int = 1) -> Event:
    return Found(ticket, session, LeaseId(5), 2, LOAD)


def test_seek_waits_for_storage(fetching_rig: LinkRig) -> None:
    """A seek asks for its blocks from storage first, and acquires when they have come."""
    client = ScriptedClient(1, acquire=HIT)
    connected(fetching_rig, client)
    begun(fetching_rig, client, 1)
    client.pending[0].end()
    assert fetching_rig.wait(1) == [found()]
    assert [call[0] for call in client.calls] == ["begin_prefetch", "acquire", "prepare_load"]
    assert client.calls[0] == ("begin_prefetch", bytes(32), 9, "timeout", 0.0)


def test_seek_that_waits_holds_up_nobody(fetching_rig: LinkRig) -> None:
    """While one seek waits for storage, offers are carried out and other seeks are answered before it."""
    client = ScriptedClient(1, acquire=HIT)
    connected(fetching_rig, client)
    begun(fetching_rig, client, 1)
    assert client.listened.wait(10)
    assert fetching_rig.link.submit(offer(7))
    assert fetching_rig.wait(1) == [Planned(7, PLAN)]
    begun(fetching_rig, client, 2)
    client.pending[1].end()
    assert fetching_rig.wait(1) == [found(2)]
    client.pending[0].end()
    assert fetching_rig.wait(1) == [found(1)]


def test_seek_for_storing_does_not_wait(fetching_rig: LinkRig) -> None:
    """A lease for storing only needs nothing from storage."""
    client = ScriptedClient(1, acquire=HIT)
    connected(fetching_rig, client)
    assert fetching_rig.link.submit(seek(load=False))
    assert fetching_rig.wait(1) == [Found(1, 1, LeaseId(5), 2, None)]
    assert client.pending == []


def test_daemon_without_storage_is_not_asked_again_soon(fetching_rig: LinkRig) -> None:
    """After the answer that there is no storage, seeks acquire at once for a while; then it is asked again."""
    client = ScriptedClient(1, acquire=HIT)
    connected(fetching_rig, client)
    begun(fetching_rig, client, 1)
    client.pending[0].end(UNAVAILABLE)
    assert fetching_rig.wait(1) == [found()]
    assert fetching_rig.link.submit(seek(2))
    assert fetching_rig.wait(1) == [found(2)]
    assert len(client.pending) == 1
    fetching_rig.now += UNAVAILABLE_S
    assert fetching_rig.link.submit(seek(3))
    assert fetching_rig.wait(1) == [Fetching(3, WAITS)]


def test_next_session_is_asked_for_storage_at_once(fetching_rig: LinkRig) -> None:
    """That one daemon has no storage says nothing about the next."""
    client, following = ScriptedClient(1, acquire=[HIT, GONE]), ScriptedClient(2, acquire=HIT)
    connected(fetching_rig, client, following)
    begun(fetching_rig, client, 1)
    client.pending[0].end(UNAVAILABLE)
    fetching_rig.wait(1)
    assert fetching_rig.link.submit(seek(2))
    lost, opened, waits = fetching_rig.wait(3)
    assert (lost, waits) == (Lost(1), Fetching(2, WAITS))
    assert isinstance(opened, Connected)


@pytest.mark.parametrize("end", [FETCHED, REFUSED, PrefetchResult(0, 0, is_over=False, reason="waiting")])
def test_whatever_became_of_a_prefetch_the_seek_acquires(
    fetching_rig: LinkRig, end: PrefetchResult | KvcachedError
) -> None:
    """Blocks that have come in time are used, and a prefetch that was refused costs its blocks alone."""
    client = ScriptedClient(1, acquire=HIT)
    connected(fetching_rig, client)
    begun(fetching_rig, client, 1)
    client.pending[0].end(end)
    assert fetching_rig.wait(1) == [found()]


def test_refused_prefetch_is_no_refused_seek(fetching_rig: LinkRig) -> None:
    """Where the daemon refuses to begin a prefetch, the seek acquires at once."""
    client = ScriptedClient(1, acquire=HIT, begin_prefetch=REFUSED)
    connected(fetching_rig, client)
    assert fetching_rig.link.submit(seek())
    assert fetching_rig.wait(1) == [found()]


@pytest.mark.parametrize("end", [GONE, EXPIRED])
def test_seeks_that_wait_are_carried_out_on_the_next_session(fetching_rig: LinkRig, end: KvcachedError) -> None:
    """A session that ends while seeks wait for storage loses none: they begin anew on the next, in their order."""
    client, following = ScriptedClient(1, settle=end), ScriptedClient(2, acquire=HIT)
    connected(fetching_rig, client, following)
    assert fetching_rig.link.submit(DropLoad(1, TransferId(8)))  # a session that worked
    client.await_calls(1)
    begun(fetching_rig, client, 1, 2)
    client.is_alive = False
    fetching_rig.link.wake()
    lost, opened, *waits = fetching_rig.wait(4)
    assert lost == Lost(1)
    assert isinstance(opened, Connected)
    assert waits == [Fetching(1, WAITS), Fetching(2, WAITS)]
    assert all(pending.is_abandoned for pending in client.pending)
    following.pending[0].end()
    assert fetching_rig.wait(1) == [found(1, 2)]


@pytest.mark.parametrize("end", [GONE, EXPIRED])
def test_session_that_ends_with_a_prefetch_is_lost_once(fetching_rig: LinkRig, end: KvcachedError) -> None:
    """Where the answer to a prefetch is that the session is over, its seek and the others begin anew on the next."""
    client, following = ScriptedClient(1), ScriptedClient(2, acquire=HIT)
    connected(fetching_rig, client, following)
    assert fetching_rig.link.submit(DropLoad(1, TransferId(8)))  # a session that worked
    client.await_calls(1)
    begun(fetching_rig, client, 1, 2)
    client.is_alive = end is GONE
    client.pending[0].end(end)
    lost, opened, *waits = fetching_rig.wait(4)
    assert lost == Lost(1)
    assert isinstance(opened, Connected)
    assert sorted(event.ticket for event in waits) == [1, 2]  # type: ignore[union-attr]
    following.pending[1].end()
    following.pending[0].end()
    assert {event.ticket for event in fetching_rig.wait(2)} == {1, 2}  # type: ignore[union-attr]


def test_daemon_that_says_nothing_is_asked_whether_it_answers(fetching_rig: LinkRig) -> None:
    """A daemon that hangs while seeks wait for storage costs them as long as any other missed deadline."""
    client = ScriptedClient(1, settle=SLOW)
    client.is_patient = False
    connected(fetching_rig, client)
    client.go_on.clear()
    assert fetching_rig.link.submit(seek(1))
    assert client.entered.wait(10)
    client.go_on.set()
    assert fetching_rig.wait(2) == [Fetching(1, WAITS), NotFound(1, is_late=True)]
    assert client.pending[0].is_abandoned
    assert not fetching_rig.link.is_taking


def test_prefetch_that_misses_its_deadline_answers_all(fetching_rig: LinkRig) -> None:
    """When the answer to a prefetch does not come, its seek and the others go without cache."""
    client = ScriptedClient(1)
    connected(fetching_rig, client)
    begun(fetching_rig, client, 1, 2)
    client.pending[1].end(SLOW)
    answers = sorted(fetching_rig.wait(2), key=lambda event: event.ticket)  # type: ignore[union-attr]
    assert answers == [NotFound(1, is_late=True), NotFound(2, is_late=True)]


def test_close_answers_seeks_that_wait(fetching_rig: LinkRig) -> None:
    """A link that closes answers seeks that wait for storage."""
    client = ScriptedClient(1)
    connected(fetching_rig, client)
    begun(fetching_rig, client, 1)
    fetching_rig.link.close()
    assert fetching_rig.wait(1) == [NotFound(1)]


def test_so_many_seeks_wait(fetching_rig: LinkRig) -> None:
    """Beyond a number of seeks that wait for storage, others acquire at once."""
    client = ScriptedClient(1, acquire=HIT)
    connected(fetching_rig, client)
    begun(fetching_rig, client, *range(1, FETCHES_MAX + 1))
    assert fetching_rig.link.submit(seek(FETCHES_MAX + 1))
    assert fetching_rig.wait(1) == [found(FETCHES_MAX + 1)]


def test_request_is_held_while_its_blocks_come_from_storage() -> None:
    """A scheduler is told to ask again for longer than the hold deadline while blocks come, and then not any more."""
    rig = Rig()
    request = rig.arrive("r", 4 * BLOCK + 1)
    (asked,) = rig.link.taken(Seek)
    rig.link.events.append(Fetching(asked.ticket, 60.0))
    assert rig.matched(request) == (None, False)
    rig.now += 60.5
    assert rig.matched(request) == (None, False)
    rig.now += 1
    assert rig.matched(request) == (0, False)
