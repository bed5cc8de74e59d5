"""Slots that copies under way will free: the client waits for them, within the deadline of its call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcached_client import Client, DeadlineExceeded, ErrorCode, NoCapacity, Stale
from kvcached_client.errors import request_error
from kvcached_client.protocol.engine import (
    BLOCKS_PER_MESSAGE_MAX,
    Acquire,
    Acquired,
    Allocate,
    Header,
    Load,
    Loaded,
    Request,
    SlotsAvailable,
    WaitForSlots,
    error_reply,
)
from kvcached_client.types import pack_ranges
from tests.client.fake_daemon import SILENCE, FakeDaemon
from tests.client.test_loading import PROMPT, TICKETS

Connect = Callable[..., Client]
Answer = tuple[Header, list[bytes]] | None


class FullPool:
    """A pool in which room is only pending while `available` holds numbers: one for each `WaitForSlots`."""

    def __init__(self, daemon: FakeDaemon, kind: type[Header], *available: int) -> None:
        self.kind = kind
        self.available = list(available)
        daemon.script = self

    def __call__(self, request: Request, _: list[bytes]) -> Answer:
        if isinstance(request, WaitForSlots):
            return SlotsAvailable(id=request.id, available=self.available.pop(0)), []
        if isinstance(request, self.kind) and self.available:
            return pending(request), []
        return None


def pending(request: Request) -> Header:
    return error_reply(request.id, request_error(ErrorCode.CAPACITY_PENDING, "full", "wait"))


def waits(daemon: FakeDaemon) -> list[int]:
    return [request.blocks for request in daemon.of(WaitForSlots) if isinstance(request, WaitForSlots)]


def test_acquire_waits_for_more_room_than_there_was(daemon: FakeDaemon, connect: Connect) -> None:
    """Each wait is for one slot more than did not suffice, and each attempt is a request of its own."""
    FullPool(daemon, Acquire, 1, 4, 5)
    client = connect()
    lease = client.acquire("a", client.chain(range(8)))
    assert lease.granted
    assert waits(daemon) == [1, 2, 5]
    attempts = daemon.of(Acquire)
    assert (len(attempts), len({request.id for request in attempts})) == (4, 4)
    assert {request.request for request in attempts if isinstance(request, Acquire)} == {"a"}


def test_allocate_waits_for_room(daemon: FakeDaemon, connect: Connect) -> None:
    """A lease grows once there is room, by what was asked for and once."""
    client = connect()
    lease = client.acquire("a", client.chain(range(8)))
    FullPool(daemon, Allocate, 1)
    lease.allocate(16)
    assert (waits(daemon), lease.block_table.tolist()) == ([1], [0, 1, 2, 3])


def test_wait_loaded_waits_for_room_for_what_was_cut_off(daemon: FakeDaemon, connect: Connect) -> None:
    """Replacements for blocks that were not loaded may have to wait for copies, too."""
    pool = FullPool(daemon, Load, 1)

    def script(request: Request, frames: list[bytes]) -> Answer:
        if isinstance(request, Acquire):
            acquired = Acquired(id=request.id, lease=7, hit=4, ready=1, loads=TICKETS)
            return acquired, [pack_ranges([(40, 4)]), pack_ranges([(10, 1)])]
        if isinstance(request, Load) and not pool.available:
            return Loaded(id=request.id, hit=3), [pack_ranges([(20, 1)])]
        return pool(request, frames)

    daemon.script = script
    client = connect()
    lease = client.acquire("a", client.chain(PROMPT))
    assert lease.wait_loaded() == 12
    assert waits(daemon) == [1]


def test_room_that_nothing_under_way_frees_is_not_waited_for(daemon: FakeDaemon, connect: Connect) -> None:
    """A wait that ends without the room it was for is followed by one more attempt, whose answer holds."""
    FullPool(daemon, Acquire, 3, 3, 99)
    client = connect()
    with pytest.raises(NoCapacity) as caught:
        client.acquire("a", client.chain(range(8)))
    assert caught.value.code == ErrorCode.CAPACITY_PENDING
    assert (waits(daemon), len(daemon.of(Acquire))) == ([1, 4], 3)


def test_final_lack_of_room_is_not_waited_for(daemon: FakeDaemon, connect: Connect) -> None:
    """Where no copy could help, the answer reaches the caller at once."""
    full = request_error(ErrorCode.NO_CAPACITY, "full", "release")
    daemon.script = lambda request, _: (error_reply(request.id, full), []) if isinstance(request, Acquire) else None
    client = connect()
    with pytest.raises(NoCapacity):
        client.acquire("a", client.chain(range(8)))
    assert (waits(daemon), len(daemon.of(Acquire))) == ([], 1)


@pytest.mark.parametrize("failures", ["raise", "miss"])
def test_room_that_does_not_come_in_time_is_no_capacity(daemon: FakeDaemon, connect: Connect, failures: str) -> None:
    """All waits together take one deadline; then the caller hears that there is no room, not that nobody answered."""
    daemon.script = lambda request, _: (
        (SILENCE, [])
        if isinstance(request, WaitForSlots)
        else (pending(request), [])
        if isinstance(request, Acquire)
        else None
    )
    client = connect(deadline_ms=250, failures=failures)
    if failures == "miss":
        assert not client.acquire("a", client.chain(range(8))).granted
        assert client.failure_count == 0
    else:
        with pytest.raises(NoCapacity) as caught:
            client.acquire("a", client.chain(range(8)))
        assert caught.value.code == ErrorCode.CAPACITY_PENDING
    assert (waits(daemon), len(daemon.of(Acquire))) == ([1], 1)


def test_attempts_and_waits_share_one_deadline(
    daemon: FakeDaemon, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it has to wait, a call takes no longer than a call may."""
    FullPool(daemon, Acquire, 1, 4)
    client = connect()
    channel, deadlines = client._channel, []
    send = channel.send

    def note(*arguments: Any, deadline_ns: int | None = None) -> None:
        deadlines.append(deadline_ns)
        send(*arguments, deadline_ns=deadline_ns)

    monkeypatch.setattr(channel, "send", note)
    client.acquire("a", client.chain(range(8)))
    assert len(deadlines) == 5
    assert len(set(deadlines)) == 1
    assert None not in deadlines


def test_unanswered_attempt_after_a_wait_is_unknown_and_repeated(daemon: FakeDaemon, connect: Connect) -> None:
    """An allocate that got no answer may have taken effect, so it is the deadline that is raised, and its id kept."""
    client = connect(deadline_ms=250)
    lease = client.acquire("a", client.chain(range(8)))
    pool = FullPool(daemon, Allocate, 1)
    daemon.script = lambda request, frames: (
        pool(request, frames) or ((SILENCE, []) if isinstance(request, Allocate) else None)
    )
    with pytest.raises(DeadlineExceeded):
        lease.allocate(16)
    daemon.script = None
    lease.allocate(16)
    refused, unanswered, repeated = daemon.of(Allocate)
    assert refused.id != unanswered.id
    assert unanswered == repeated


def test_session_that_ends_during_the_wait_is_stale(daemon: FakeDaemon, connect: Connect) -> None:
    """What ends the session ends the wait for room in it."""
    over = request_error(ErrorCode.SESSION_EXPIRED, "over", "attach again")
    daemon.script = lambda request, _: (
        (error_reply(request.id, over), [])
        if isinstance(request, WaitForSlots)
        else (pending(request), [])
        if isinstance(request, Acquire)
        else None
    )
    client = connect()
    with pytest.raises(Stale):
        client.acquire("a", client.chain(range(8)))
    assert not client.is_alive


def test_more_room_than_a_message_can_ask_for_is_not_asked_for(daemon: FakeDaemon, connect: Connect) -> None:
    """A request that the largest wait does not help is refused as it is."""
    FullPool(daemon, Acquire, BLOCKS_PER_MESSAGE_MAX, 1)
    client = connect()
    with pytest.raises(NoCapacity):
        client.acquire("a", client.chain(range(8)))
    assert waits(daemon) == [1]
