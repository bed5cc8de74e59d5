"""Prefetches that wait for a store of another session: one answer each, in time, with and without storage."""

from __future__ import annotations

import pytest

from kvcached.core.messages import QueryStorage, StorageAnswered, StorageReady
from kvcached.service.pending import Answer
from kvcached.service.storage_verbs import STORE_PATIENCE_MS, StorageService
from kvcached_client.protocol import engine as wire
from kvcached_client.protocol.sessions import StopPolicy
from tests.service.office import ONE, TWO, FakePeer, key_chain
from tests.service.offload_office import INSTANCE, OTHER_INSTANCE, OffloadOffice
from tests.service.test_storage_verbs import FakeStorageLink, told

#: Of the prompt, and those of them that are being stored.
BLOCKS, STORED = 6, 4
#: Tokens per second: the blocks that are stored would take 40 ms.
RATE = 400.0


class WaitOffice(OffloadOffice):
    """A service with an engine of two shards that is storing a part of a prompt, and another one, which asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = FakePeer(1)
        self.welcome = self.attach(self.writer, instance=INSTANCE)
        self.attach(FakePeer(2), peer=TWO, instance=OTHER_INSTANCE)
        self.plan = self.storing(STORED)

    def prefetch(
        self, stop: StopPolicy = "timeout", *, deadline_ms: int = 60_000, rate: float = RATE, blocks: int = BLOCKS
    ) -> list[Answer]:
        """The answers to the second engine's request; the list grows when they come."""
        answers: list[Answer] = []
        request = wire.Prefetch(
            id=self.next_id(), tokens=4 * blocks, full=True, stop=stop, deadline_ms=deadline_ms,
            prefill_tokens_per_s=rate,
        )  # fmt: skip
        self.service.submit(TWO, request, [key_chain(blocks)], answers.append)
        return answers

    def stored(self) -> None:
        """Both shards have stored."""
        for shard in range(2):
            self.expect(wire.Settled, self.transfer_done(self.welcome, self.plan.transfer, shard), peer=bytes([shard]))


@pytest.fixture
def office() -> WaitOffice:
    return WaitOffice()


def test_acquire_tells_of_a_store_under_way(office: WaitOffice) -> None:
    """The answer to an acquire says how many blocks behind the hit another session is storing."""
    held = office.acquire_blocks(BLOCKS, peer=TWO)
    assert (held.hit, held.filling) == (0, STORED)
    office.stored()

    later = office.acquire_blocks(BLOCKS, request="later", peer=TWO)
    assert (later.hit, later.filling) == (STORED, 0)


def test_answer_comes_with_the_end_of_the_store(office: WaitOffice) -> None:
    """A daemon without storage answers when the last shard is through, and its timer is over."""
    answers = office.prefetch()
    assert answers == []
    office.stored()

    assert told(answers) == (STORED, 0, True, "stored")
    assert [timer.cancelled for timer in office.timers] == [True]


@pytest.mark.parametrize(
    ("stop", "deadline_ms", "rate", "waits_s"),
    [
        ("timeout", 60_000, RATE, 0.04),
        ("timeout", 30, RATE, 0.03),
        ("timeout", 60_000, 0.0, STORE_PATIENCE_MS / 1000),
        ("wait_complete", 500, RATE, 0.5),
    ],
)
def test_nobody_waits_longer_than_it_takes_to_compute(
    office: WaitOffice, stop: StopPolicy, deadline_ms: int, rate: float, waits_s: float
) -> None:
    """A wait lasts no longer than the engine computes the same blocks; then the answer is what there is, exactly."""
    answers = office.prefetch(stop, deadline_ms=deadline_ms, rate=rate)
    (timer,) = office.timers
    assert timer.delay_s == waits_s
    timer.ring()

    assert told(answers) == (0, 0, False, "waiting")
    assert office.cache.storage.prefetches.under_way == {}
    office.stored()
    assert (len(answers), office.hit(BLOCKS, peer=TWO)) == (1, STORED)


def test_best_effort_does_not_wait_for_a_store(office: WaitOffice) -> None:
    """The answer comes at once, and nothing is left when the store ends."""
    assert told(office.prefetch("best_effort")) == (0, 0, False, "waiting")
    assert office.timers == []
    office.stored()

    assert office.cache.storage.prefetches.under_way == {}


def test_death_of_the_storing_engine_answers_who_waits(office: WaitOffice) -> None:
    """When the storing engine is dead the answer comes at once, and says what is there."""
    answers = office.prefetch()
    office.die(office.writer)

    assert told(answers) == (0, 0, True, "failed")


def test_clear_answers_who_waits(office: WaitOffice) -> None:
    """A clear, by whomever, ends the wait."""
    answers = office.prefetch()
    office.expect(wire.Cleared, wire.Clear(id=office.next_id(), epoch=office.welcome.epoch))

    assert told(answers)[2:] == (True, "cleared")


def test_end_of_the_waiting_session_ends_the_wait(office: WaitOffice) -> None:
    """A waiter that says goodbye leaves no wait behind, and has its one answer."""
    answers = office.prefetch()
    office.expect(wire.Goodbye, wire.Bye(id=office.next_id()), peer=TWO)

    assert told(answers) == (0, 0, False, "waiting")
    assert office.cache.storage.prefetches.under_way == {}


def test_end_of_the_daemon_answers_who_waits(office: WaitOffice) -> None:
    """A daemon that ends lets nobody wait."""
    answers = office.prefetch()
    office.service.close()

    assert told(answers) == (0, 0, False, "waiting")


def test_storage_is_waited_for_behind_the_store(office: WaitOffice) -> None:
    """With storage, the time for it comes on top; it is asked for the blocks behind all that is there by then."""
    link = FakeStorageLink()
    office.service.storage.storage = StorageService(link, "disk", "never", 200, 1000)
    office.service.on_event(StorageReady())
    answers = office.prefetch()
    assert [timer.delay_s for timer in office.timers] == [0.04 + 0.2 + 0.024]
    assert link.orders == []
    office.stored()
    (query,) = (order for order in link.orders if isinstance(order, QueryStorage))
    assert len(query.keys) // 16 == BLOCKS - STORED
    office.service.on_event(StorageAnswered(query.query, 0, 0))

    assert told(answers) == (STORED, 0, True, "nothing")


def test_writer_does_not_wait_for_itself(office: WaitOffice) -> None:
    """The engine that stores asks for the same prompt: it is told at once that there is nothing to wait for."""
    request = wire.Prefetch(id=office.next_id(), tokens=4 * BLOCKS, full=True, stop="wait_complete")
    answer = office.ask(request, key_chain(BLOCKS), peer=ONE)

    assert told([answer]) == (0, 0, True, "unavailable")
