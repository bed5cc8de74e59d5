"""What listeners of vLLM's cache events learn of the host pool: never of blocks that nobody can load any more."""

from __future__ import annotations

import pytest

from kvcached_client.vllm.scheduling import announcements as module
from kvcached_client.vllm.scheduling.announcements import (
    Announcement,
    Announcements,
    RemovedBlocks,
    StoredBlocks,
)
from tests.vllm_connector.rig import BLOCK, FakeRequest, Rig, running


def request(blocks: int) -> FakeRequest:
    return FakeRequest("r", range(blocks * BLOCK + 1))


def removed(of: FakeRequest, start: int, stop: int) -> RemovedBlocks:
    return RemovedBlocks(tuple(of.block_hashes[start:stop]))


def taken(rig: Rig) -> list[Announcement]:
    return rig.side.announcements.take()


def test_without_listeners_nothing_is_announced() -> None:
    """If vLLM publishes no events, none are collected."""
    announcements = Announcements(is_on=False)
    announcements.stored(request(2), 0, 2, 1)
    announcements.found(request(2), 1, 2, 5)
    announcements.cleared()
    assert announcements.take() == []


def test_blocks_are_announced_once() -> None:
    """Blocks that were announced before are left out, so that one range may become two."""
    announcements, of = Announcements(is_on=True), request(5)
    announcements.stored(of, 2, 3, 1)
    announcements.stored(of, 0, 5, 2)
    announcements.stored(of, 0, 5, 3)
    assert announcements.take() == [StoredBlocks(of, 2, 3), StoredBlocks(of, 0, 2), StoredBlocks(of, 3, 5)]
    assert announcements.take() == []


def test_blocks_behind_a_chain_that_became_shorter_are_not_announced() -> None:
    """A reply that counts more blocks than the request still has hashes for tells of those that it has."""
    announcements, of = Announcements(is_on=True), request(2)
    announcements.found(of, 3, 4, 1)
    assert announcements.take() == [StoredBlocks(of, 0, 2)]


def test_stored_blocks_are_announced_when_all_workers_have_stored_them() -> None:
    """A store is announced with its last report, and not if it failed on a worker."""
    rig = Rig(shards=2, announces=True)
    of, _ = running(rig, "r", 3 * BLOCK + 1)
    rig.plan(pieces=[(0, 2)], depth=3)
    orders = rig.idle()
    rig.report(orders)
    assert taken(rig) == []
    rig.report(orders)
    assert taken(rig) == [StoredBlocks(of, 0, 2)]

    running(rig, "s", 2 * BLOCK + 1)
    rig.plan()
    orders = rig.idle()
    taken(rig)
    rig.report(orders, workers=2, failed=True)
    assert taken(rig) == []


def test_hits_are_announced() -> None:
    """Blocks that another engine or an earlier start has stored are announced when a request hits them."""
    rig = Rig(announces=True)
    of = rig.arrive("r", 3 * BLOCK + 1)
    rig.found(2)
    rig.matched(of)
    assert taken(rig) == [StoredBlocks(of, 0, 2)]


def test_evictions_are_announced_when_a_request_misses() -> None:
    """What was announced, and a later request does not find, is announced as removed; then it may be stored again."""
    rig = Rig(announces=True)
    of = rig.arrive("r", 4 * BLOCK + 1)
    rig.found(4)
    rig.matched(of)
    taken(rig)
    again = rig.arrive("s", 4 * BLOCK + 1)
    rig.found(1)
    rig.matched(again)
    assert taken(rig) == [removed(of, 1, 4)]
    rig.arrive("t", 4 * BLOCK + 1)
    rig.found(4)
    rig.idle()
    assert [type(each) for each in taken(rig)] == [StoredBlocks]


def test_the_last_block_of_a_prompt_is_not_taken_for_removed() -> None:
    """A prompt of full blocks cannot hit its last one, because a token must be computed: that says nothing."""
    rig = Rig(announces=True)
    rig.arrive("r", 3 * BLOCK + 1)
    rig.found(3)
    rig.idle()
    taken(rig)
    rig.arrive("s", 3 * BLOCK)
    rig.found(2)
    rig.idle()
    assert taken(rig) == []


def test_a_reply_from_before_the_store_removes_nothing() -> None:
    """A reply to a seek that was sent before blocks were announced may not know of them."""
    rig = Rig(announces=True)
    _, _ = running(rig, "r", 2 * BLOCK + 1)
    rig.plan()
    orders = rig.idle()
    rig.arrive("s", 2 * BLOCK + 1)
    rig.report(orders)
    assert len(taken(rig)) == 1
    rig.found(0)
    rig.idle()
    assert taken(rig) == []


def test_a_clear_removes_all() -> None:
    """After a clear that is confirmed, all announced blocks are announced as removed; before that, none."""
    rig = Rig(announces=True)
    of = rig.arrive("r", 3 * BLOCK + 1)
    rig.found(3)
    rig.matched(of)
    taken(rig)
    rig.link.clear_works = False
    assert not rig.side.reset()
    assert taken(rig) == []
    rig.link.clear_works = True
    assert rig.side.reset()
    assert taken(rig) == [removed(of, 0, 3)]


def test_blocks_beyond_the_bound_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest blocks beyond the bound are announced as removed, in announcements of bounded size."""
    monkeypatch.setattr(module, "BLOCKS_MAX", 3)
    monkeypatch.setattr(module, "_REMOVED_MAX", 2)
    announcements, of = Announcements(is_on=True), request(6)
    announcements.stored(of, 0, 6, 1)
    assert announcements.take() == [StoredBlocks(of, 0, 6), removed(of, 0, 2), removed(of, 2, 3)]


def test_announcements_that_nobody_takes_are_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If vLLM takes no events, the oldest are lost, and that is logged once."""
    monkeypatch.setattr(module, "WAITING_MAX", 2)
    announcements, of = Announcements(is_on=True), request(5)
    for depth in range(5):
        announcements.stored(of, depth, depth + 1, 1)
    assert announcements.take() == [StoredBlocks(of, 3, 4), StoredBlocks(of, 4, 5)]
    assert len(caplog.records) == 1
