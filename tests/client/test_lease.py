"""A lease's life: acquire, commit in chunks, grow, finish, and the ways it can go wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvcached_client import BadRequest, Client, DaemonFailure, DeadlineExceeded, ErrorCode, NoCapacity, Refused, Stale
from kvcached_client.errors import DaemonSilent, request_error
from kvcached_client.protocol.engine import (
    Acquire,
    Acquired,
    Allocate,
    Commit,
    Committed,
    Header,
    Release,
    Request,
    error_reply,
)
from kvcached_client.types import pack_ranges, unpack_ranges
from tests.client.fake_daemon import SILENCE, FakeDaemon

Connect = Callable[..., Client]
Answer = tuple[Header, list[bytes]] | None


def hit_of(blocks: int, exclusive: list[tuple[int, int]]) -> Callable[[Request, list[bytes]], Answer]:
    """A daemon on which `blocks` blocks from slot 40 on are a hit, and the rest gets `exclusive`."""

    def script(request: Request, _: list[bytes]) -> Answer:
        if not isinstance(request, Acquire):
            return None
        return Acquired(id=request.id, lease=7, hit=blocks, ready=blocks), [
            pack_ranges([(40, blocks)]),
            pack_ranges(exclusive),
        ]

    return script


def commits(daemon: FakeDaemon) -> list[tuple[int, bytes, list[tuple[int, int]]]]:
    """Every commit that came, alone or in a release: start, keys, slots."""
    return [
        (request.start, frames[0], unpack_ranges(frames[1]))
        for request, frames in daemon.requests
        if isinstance(request, Commit | Release) and frames
    ]


def test_acquire_grants_a_block_table(daemon: FakeDaemon, connect: Connect) -> None:
    """Slots of the hit and then exclusive ones, by position; the hit needs no computing."""
    client = connect()
    daemon.script = hit_of(2, [(10, 1), (5, 2)])
    lease = client.acquire("a", client.chain(range(14)), reserve_tokens=6)
    assert lease.granted
    assert lease.block_table.dtype == np.int32
    assert lease.block_table.tolist() == [40, 41, 10, 5, 6]
    assert (lease.id, lease.hit_blocks, lease.hit_tokens, lease.capacity_tokens) == (7, 2, 8, 20)
    with pytest.raises(ValueError, match="read-only"):
        lease.block_table[0] = 1


def test_numbers_of_numpy_count_as_others(daemon: FakeDaemon, connect: Connect) -> None:
    """Nothing is computed in the few bits of the caller's type, in which a sum would begin at 0 again."""
    client = connect()
    plain = client.acquire("a", client.chain(range(200)), reserve_tokens=100, priority=4, prompt_tokens=200)
    small = client.acquire(
        "b",
        client.chain(range(1000, 1200)),
        reserve_tokens=np.uint8(100),  # type: ignore[arg-type]
        priority=np.int8(4),  # type: ignore[arg-type]
        prompt_tokens=np.uint8(200),  # type: ignore[arg-type]
    )

    assert small.capacity_tokens == plain.capacity_tokens
    first, second = [request for request, _ in daemon.requests if isinstance(request, Acquire)]
    assert (second.reserve, second.priority, second.tokens) == (first.reserve, first.priority, first.tokens)


@pytest.mark.parametrize(
    ("tokens", "reserve_tokens", "reserve"), [(8, 0, 0), (8, 1, 1), (5, 3, 0), (5, 4, 1), (8, 9, 3)]
)
def test_acquire_reserves_blocks_for_prompt_and_output_together(
    daemon: FakeDaemon, connect: Connect, tokens: int, reserve_tokens: int, reserve: int
) -> None:
    """Output first fills the prompt's last block; only what goes beyond it is reserved."""
    client = connect()
    lease = client.acquire("a", client.chain(range(tokens)), reserve_tokens=reserve_tokens)
    (request,) = daemon.of(Acquire)
    assert isinstance(request, Acquire)
    assert (request.tokens, request.reserve) == (tokens, reserve)
    assert lease.capacity_tokens >= tokens + reserve_tokens


@pytest.mark.parametrize(
    ("hit", "frames"),
    [
        (1, [b"", pack_ranges([(0, 1)])]),
        (0, [b"", pack_ranges([(0, 1)])]),
        (0, [b"", pack_ranges([(0, 3)])]),
        (0, [b"", pack_ranges([(-1, 2)])]),
    ],
)
def test_acquire_refuses_slots_that_do_not_add_up(
    daemon: FakeDaemon, connect: Connect, hit: int, frames: list[bytes]
) -> None:
    """A reply whose ranges do not fit its counts never becomes a block table."""
    client = connect()
    daemon.script = lambda request, _: (
        (Acquired(id=request.id, lease=7, hit=hit, ready=hit), frames) if isinstance(request, Acquire) else None
    )
    with pytest.raises(BadRequest) as caught:
        client.acquire("a", client.chain(range(8)))
    assert caught.value.code == ErrorCode.MALFORMED


def test_acquire_refuses_ragged_ranges(daemon: FakeDaemon, connect: Connect) -> None:
    """Slots that are no whole ranges are an error, not a shorter table."""
    client = connect()
    daemon.script = lambda request, _: (
        (Acquired(id=request.id, lease=7, hit=0, ready=0), [b"", bytes(9)]) if isinstance(request, Acquire) else None
    )
    with pytest.raises(BadRequest) as caught:
        client.acquire("a", client.chain(range(8)))
    assert caught.value.code == ErrorCode.BAD_FRAMES


def test_commit_sends_each_full_block_once(daemon: FakeDaemon, connect: Connect) -> None:
    """Chunked prefill and decoding commit the new full blocks after the hit, with their keys and slots."""
    client = connect()
    daemon.script = hit_of(1, [(10, 1), (5, 3)])
    chain = client.chain(range(14))
    lease = client.acquire("a", chain, reserve_tokens=4)
    lease.commit(6)
    assert commits(daemon) == []
    lease.commit(13)
    assert commits(daemon) == [(1, chain.key_range(1, 3), [(10, 1), (5, 1)])]
    lease.commit(13)
    chain.extend(range(14, 18))
    lease.commit(17)
    assert commits(daemon)[1:] == [(3, chain.key_range(3, 4), [(6, 1)])]
    assert lease.depth == 4


def test_commit_of_duplicates_keeps_the_block_table(daemon: FakeDaemon, connect: Connect) -> None:
    """A block that somebody else committed first counts for the depth, and the lease goes on using its own slot."""
    client = connect()
    lease = client.acquire("a", client.chain(range(8)))
    before = lease.block_table.tolist()
    daemon.script = lambda request, _: (
        (Committed(id=request.id, depth=2, adopted=0, duplicates=2), []) if isinstance(request, Commit) else None
    )
    lease.commit(8)
    assert (lease.depth, lease.block_table.tolist()) == (2, before)


@pytest.mark.parametrize(("prompt_tokens", "depth"), [(None, 4), (16, 4), (11, 2), (1, 0)])
def test_output_of_an_earlier_lease_is_no_prompt(connect: Connect, prompt_tokens: int | None, depth: int) -> None:
    """Of a chain with output, ``cache="prompt"`` makes the blocks findable that hold nothing but the prompt."""
    client = connect()
    lease = client.acquire("again", client.chain(range(16)), cache="prompt", prompt_tokens=prompt_tokens)
    lease.commit(16)
    assert lease.depth == depth


@pytest.mark.parametrize("prompt_tokens", [0, -1, 17])
def test_prompt_is_part_of_the_chain(connect: Connect, prompt_tokens: int) -> None:
    """A prompt that is empty, or longer than the chain, is a mistake of the caller."""
    client = connect(failures="miss")
    with pytest.raises(BadRequest, match="the chain holds 16"):
        client.acquire("r", client.chain(range(16)), prompt_tokens=prompt_tokens)


@pytest.mark.parametrize(
    ("cache", "committed"), [("all", [(0, 4)]), ("prompt", [(0, 2)]), ("nothing", [])], ids=["all", "prompt", "nothing"]
)
def test_cache_policy_decides_which_blocks_are_committed(
    daemon: FakeDaemon, connect: Connect, cache: str, committed: list[tuple[int, int]]
) -> None:
    """A prompt's last block that output fills up holds output, so "prompt" leaves it out."""
    client = connect()
    chain = client.chain(range(10))
    lease = client.acquire("a", chain, reserve_tokens=8, cache=cache)  # type: ignore[arg-type]
    chain.extend(range(10, 17))
    lease.finish(17)
    assert [(start, len(keys) // 16) for start, keys, _ in commits(daemon)] == committed
    assert len(daemon.of(Release)) == 1


@pytest.mark.parametrize("failures", ["raise", "miss"])
@pytest.mark.parametrize("computed_tokens", [-1, 9, 12, 13])
def test_commit_beyond_tokens_or_slots_is_the_callers_error(
    daemon: FakeDaemon, connect: Connect, failures: str, computed_tokens: int
) -> None:
    """What cannot have been computed is refused here, with either setting of failures, and the lease goes on."""
    client = connect(failures=failures)
    chain = client.chain(range(8))
    lease = client.acquire("a", chain)
    if computed_tokens > 12:
        chain.extend(range(8, 16))
    for call in (lease.commit, lease.finish):
        with pytest.raises(BadRequest) as caught:
            call(computed_tokens)
        assert caught.value.code == ErrorCode.BAD_VALUE
    assert commits(daemon) == []
    lease.finish(8)
    assert len(commits(daemon)) == 1


def test_finish_commits_and_releases_in_one_message(daemon: FakeDaemon, connect: Connect) -> None:
    """One message ends a request, and leaving the context sends no second one."""
    client = connect()
    chain = client.chain(range(8))
    with client.acquire("a", chain) as lease:
        lease.finish(8)
    (release,) = daemon.of(Release)
    assert isinstance(release, Release)
    assert (release.lease, release.start, release.reply) == (7, 0, True)
    assert commits(daemon) == [(0, chain.keys, [(0, 2)])]
    assert daemon.of(Commit) == []


def test_context_releases_without_commit(daemon: FakeDaemon, connect: Connect) -> None:
    """A request that fails gives its slots back and makes nothing findable."""
    client = connect()
    with pytest.raises(ZeroDivisionError), client.acquire("a", client.chain(range(8))):
        raise ZeroDivisionError
    assert len(daemon.of(Release)) == 1
    assert commits(daemon) == []


def test_release_is_idempotent_and_the_rest_is_refused_after_it(daemon: FakeDaemon, connect: Connect) -> None:
    """A second release does nothing; a commit, a growth or a finish after it is an error."""
    client = connect()
    lease = client.acquire("a", client.chain(range(8)))
    lease.release()
    lease.release()
    assert len(daemon.of(Release)) == 1
    for call in (lease.commit, lease.allocate, lease.finish):
        with pytest.raises(Refused) as caught:
            call(8)
        assert caught.value.code == ErrorCode.ALREADY_RELEASED


def test_fences_travel_with_commit_and_release(daemon: FakeDaemon, connect: Connect) -> None:
    """The fence given is the fence sent."""
    client = connect()
    chain = client.chain(range(8))
    lease = client.acquire("a", chain)
    lease.commit(4, fence=5)  # type: ignore[arg-type]
    lease.finish(8, fence=6)  # type: ignore[arg-type]
    lease = client.acquire("b", chain)
    lease.release(fence=7)  # type: ignore[arg-type]
    sent = [request.fence for request, _ in daemon.requests if isinstance(request, Commit | Release)]
    assert sent == [5, 6, 7]


def test_allocate_grows_to_the_tokens_asked_for(daemon: FakeDaemon, connect: Connect) -> None:
    """Only missing blocks are asked for, and the block table grows at its end."""
    client = connect()
    lease = client.acquire("a", client.chain(range(8)))
    lease.allocate(8)
    assert daemon.of(Allocate) == []
    lease.allocate(9)
    lease.allocate(20)
    assert [request.blocks for request in daemon.of(Allocate) if isinstance(request, Allocate)] == [1, 2]
    assert lease.block_table.tolist() == [0, 1, 2, 3, 4]
    assert lease.capacity_tokens == 20


def test_allocate_without_capacity_leaves_the_lease_as_it_was(daemon: FakeDaemon, connect: Connect) -> None:
    """A lease that cannot grow still commits and releases."""
    client = connect()
    lease = client.acquire("a", client.chain(range(8)))
    daemon.script = lambda request, _: (
        (error_reply(request.id, request_error(ErrorCode.NO_CAPACITY, "full", "wait")), [])
        if isinstance(request, Allocate)
        else None
    )
    with pytest.raises(NoCapacity):
        lease.allocate(9)
    assert lease.capacity_tokens == 8
    lease.finish(8)
    assert len(commits(daemon)) == 1


@pytest.mark.parametrize("verb", ["commit", "allocate", "finish", "release"])
def test_unanswered_request_is_sent_again_with_its_id(daemon: FakeDaemon, connect: Connect, verb: str) -> None:
    """After a deadline the same call sends the same request, so that the daemon can answer without doing it twice."""
    client = connect(deadline_ms=250)
    lease = client.acquire("a", client.chain(range(8)))
    call: Callable[[], None] = {
        "commit": lambda: lease.commit(8),
        "allocate": lambda: lease.allocate(12),
        "finish": lambda: lease.finish(8),
        "release": lease.release,
    }[verb]
    sent_before = len(daemon.requests)
    daemon.script = lambda *_: (SILENCE, [])
    with pytest.raises(DeadlineExceeded):
        call()
    daemon.script = None
    call()
    first, second = daemon.requests[sent_before:]
    assert first == second


@pytest.mark.parametrize("verb", ["commit", "allocate", "finish", "release"])
def test_request_behind_which_an_interrupt_came_is_sent_again_with_its_id(
    connect: Connect, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """An interrupt right behind the sending leaves a request to be repeated, as a passed deadline does."""
    client = connect()
    chain = client.chain(range(8))
    lease = client.acquire("a", chain)
    call: Callable[[], None] = {
        "commit": lambda: lease.commit(8),
        "allocate": lambda: lease.allocate(12),
        "finish": lambda: lease.finish(8),
        "release": lease.release,
    }[verb]
    sent_before, send = len(daemon.requests), client._channel.send

    def interrupt(*args: Any, **options: Any) -> None:
        send(*args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(client._channel, "send", interrupt)
        with pytest.raises(KeyboardInterrupt):
            call()
    call()
    client.match(chain)  # comes behind both
    first, second, _ = daemon.requests[sent_before:]
    assert first == second


def test_request_that_was_not_sent_is_not_repeated(
    connect: Connect, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call whose request could not be sent leaves nothing to be settled by the next call."""
    client = connect()
    lease = client.acquire("a", client.chain(range(8)))

    def refuse(*_: Any, **__: Any) -> None:
        raise DaemonSilent("nobody reads")

    with monkeypatch.context() as patch:
        patch.setattr(client._channel, "send", refuse)
        with pytest.raises(DaemonSilent):
            lease.allocate(12)
    lease.commit(8)
    assert not daemon.of(Allocate)
    assert len(daemon.of(Commit)) == 1


def test_unanswered_commit_is_settled_before_the_next_one(daemon: FakeDaemon, connect: Connect) -> None:
    """A later commit starts where the unanswered one ended, once that has its answer."""
    client = connect(deadline_ms=250)
    chain = client.chain(range(8))
    lease = client.acquire("a", chain)
    daemon.script = lambda *_: (SILENCE, [])
    with pytest.raises(DeadlineExceeded):
        lease.commit(4)
    daemon.script = None
    lease.finish(8)
    assert [start for start, _, _ in commits(daemon)] == [0, 0, 1]
    assert len(daemon.of(Release)) == 1


def test_release_does_not_wait_for_an_unanswered_commit(daemon: FakeDaemon, connect: Connect) -> None:
    """Giving back needs no depth, so nothing is settled first."""
    client = connect(deadline_ms=250)
    lease = client.acquire("a", client.chain(range(8)))
    daemon.script = lambda request, _: (SILENCE, []) if isinstance(request, Commit) else None
    with pytest.raises(DeadlineExceeded):
        lease.commit(4)
    lease.release()
    assert len(daemon.of(Commit)) == 1
    assert len(daemon.of(Release)) == 1


def test_finish_that_cannot_commit_still_releases_where_failures_are_misses(
    daemon: FakeDaemon, connect: Connect
) -> None:
    """A refused commit must not leave slots behind that nobody will ever give back."""
    client = connect(failures="miss")
    lease = client.acquire("a", client.chain(range(8)))

    def script(request: Request, frames: list[bytes]) -> Answer:
        if not frames:
            return None
        return error_reply(request.id, request_error(ErrorCode.WORKER_LOST, "gone", "wait")), []

    daemon.script = script
    lease.finish(8)
    assert [bool(frames) for request, frames in daemon.requests if isinstance(request, Release)] == [True, False]
    assert client.failure_count == 1


def test_finish_that_cannot_commit_raises_and_keeps_the_lease(daemon: FakeDaemon, connect: Connect) -> None:
    """The caller sees why, and leaving the context gives the slots back."""
    client = connect()

    def script(request: Request, frames: list[bytes]) -> Answer:
        if not isinstance(request, Release) or not frames:
            return None
        return error_reply(request.id, request_error(ErrorCode.WORKER_LOST, "gone", "wait")), []

    daemon.script = script
    with pytest.raises(DaemonFailure), client.acquire("a", client.chain(range(8))) as lease:
        lease.finish(8)
    assert [bool(frames) for request, frames in daemon.requests if isinstance(request, Release)] == [True, False]


def test_stale_lease_is_not_given_back(daemon: FakeDaemon, connect: Connect) -> None:
    """When the epoch is over there is nothing to release."""
    client = connect()
    daemon.script = lambda request, _: (
        (error_reply(request.id, request_error(ErrorCode.STALE_EPOCH, "old", "attach again")), [])
        if isinstance(request, Commit)
        else None
    )
    with pytest.raises(Stale), client.acquire("a", client.chain(range(8))) as lease:
        lease.commit(8)
    assert daemon.of(Release) == []


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("cache", "foo", "cache 'foo' (give one of 'all', 'prompt', 'nothing')"),
        ("priority", 99, "priority 99 (give -8 to 7)"),
        ("reserve_tokens", -1, "reserve_tokens -1 (give 0 or more)"),
    ],
)
def test_option_that_is_out_of_range_is_named(
    daemon: FakeDaemon, connect: Connect, option: str, value: Any, words: str
) -> None:
    """Of the options of an acquire, the one at fault is told with its range, and no other."""
    client = connect()
    with pytest.raises(BadRequest) as caught:
        client.acquire("a", client.chain(range(8)), **{option: value})
    assert str(caught.value) == f"bad_value: {words}"
    assert daemon.of(Acquire) == []


@pytest.mark.parametrize("number", [7.9, "8", [1], True])
def test_tokens_are_whole_numbers(daemon: FakeDaemon, connect: Connect, number: Any) -> None:
    """Another kind of number is refused where it was given; numbers of NumPy are taken, and the lease is unchanged."""
    client = connect()
    chain = client.chain(range(8))
    for option in ("reserve_tokens", "prompt_tokens", "priority"):
        with pytest.raises(BadRequest, match=f"{option} .*whole number"):
            client.acquire("a", chain, **{option: number})
    lease = client.acquire("a", chain, reserve_tokens=np.int64(4))  # type: ignore[arg-type]
    for call in (lease.allocate, lease.commit, lease.finish):
        with pytest.raises(BadRequest, match=r"tokens .*whole number"):
            call(number)
    with pytest.raises(BadRequest, match=r"fence .*whole number"):
        lease.commit(8, fence=number)
    lease.commit(np.int32(8))  # type: ignore[arg-type]
    assert (len(daemon.of(Acquire)), len(daemon.of(Allocate)), len(commits(daemon))) == (1, 0, 1)


@pytest.mark.parametrize("wait", [True, False])
def test_released_lease_has_no_block_table(daemon: FakeDaemon, connect: Connect, wait: bool) -> None:
    """Its slots may be those of others. That of a lease whose session is over stays: its engine may still compute."""
    client = connect()
    lease = client.acquire("a", client.chain(range(8)))
    lease.release(wait=wait)
    with pytest.raises(Refused, match=r"is released.*acquire again"):
        _ = lease.block_table
    stale = client.acquire("b", client.chain(range(8)))
    table = stale.block_table.tolist()
    daemon.script = lambda request, _: (error_reply(request.id, request_error(ErrorCode.NO_SESSION, "over", "-")), [])
    with pytest.raises(Stale):
        stale.commit(8)
    assert stale.block_table.tolist() == table
