"""Commands that wait for the link's thread."""

from __future__ import annotations

from kvcached_client.types import LeaseId, TransferId
from kvcached_client.vllm.daemon.commands import Command, DropLoad, Offer, Release, Seek
from kvcached_client.vllm.daemon.inbox import (
    BLOCKS_GATHERED_MAX,
    GATHER_S,
    OTHERS_PER_TURN_MAX,
    SEEKS_PER_TURN_MAX,
    CommandQueue,
)
from tests.vllm_connector.link_rig import offer, seek

#: When nothing waits for others any more.
LATER = 1.0


def queue_of(*commands: Command) -> CommandQueue:
    queue = CommandQueue()
    for command in commands:
        queue.put(command, 0.0)
    return queue


def test_seeks_that_a_request_waits_for_go_first() -> None:
    """Seeks with a load come first, in their order; all other commands follow, in theirs."""
    queue = queue_of(offer(1), seek(2, load=False), seek(3), Release(1, LeaseId(5)), seek(4))
    assert queue.take_turn(LATER) == [seek(3), seek(4), offer(1), seek(2, load=False), Release(1, LeaseId(5))]
    assert len(queue) == 0


def test_others_have_their_turn_beside_any_number_of_seeks() -> None:
    """However many seeks wait, each turn has some of the other commands, so that blocks and leases come free."""
    queue = queue_of(*(offer(ticket) for ticket in range(2 * OTHERS_PER_TURN_MAX)))
    offers: list[object] = []
    for _ in range(2):
        for ticket in range(2 * SEEKS_PER_TURN_MAX):
            queue.put(seek(ticket), 0.0)
        turn = queue.take_turn(LATER)
        assert len(turn) == SEEKS_PER_TURN_MAX + OTHERS_PER_TURN_MAX
        offers += [command for command in turn if isinstance(command, Offer)]
    assert offers == [offer(ticket) for ticket in range(2 * OTHERS_PER_TURN_MAX)]


def test_offers_and_releases_wait_for_others() -> None:
    """They have their turn together, when the first has waited long enough; seeks do not wait for that."""
    queue = CommandQueue()
    queue.put(offer(1), 0.0)
    queue.put(Release(1, LeaseId(5)), GATHER_S / 2)
    assert queue.due_in(GATHER_S / 2) == GATHER_S / 2
    queue.put(seek(2), GATHER_S / 2)
    assert queue.due_in(GATHER_S / 2) == 0
    assert queue.take_turn(GATHER_S / 2) == [seek(2)]
    assert (queue.due_in(GATHER_S), queue.take_turn(GATHER_S)) == (0, [offer(1), Release(1, LeaseId(5))])
    assert queue.due_in(GATHER_S) is None


def test_other_commands_take_what_waits_along() -> None:
    """A command that does not wait keeps its place behind what came before it."""
    queue = queue_of(offer(1), DropLoad(1, TransferId(3)))
    assert queue.take_turn(0.0) == [offer(1), DropLoad(1, TransferId(3))]


def test_many_offers_and_large_ones_do_not_wait() -> None:
    """A full turn, or blocks that cost more than their message, go at once; so does everything when it is hurried."""
    queue = queue_of(*(offer(ticket) for ticket in range(OTHERS_PER_TURN_MAX - 1)))
    assert queue.due_in(0.0)
    queue.put(offer(99), 0.0)
    assert queue.due_in(0.0) == 0
    large = queue_of(offer(1), Offer(2, 1, LeaseId(5), 0, bytes(16 * BLOCKS_GATHERED_MAX)))
    assert large.due_in(0.0) == 0
    hurried = queue_of(offer(1))
    hurried.hurry()
    assert hurried.take_turn(0.0) == [offer(1)]


def test_seeks_that_are_put_back_are_first_again() -> None:
    """Seeks that could not be carried out keep their order, before those that came since."""
    queue = queue_of(seek(1), seek(2), seek(3))
    turn = queue.take_turn(LATER)
    queue.put(seek(4), 0.0)
    queue.put_back([each for each in turn if isinstance(each, Seek)])
    assert queue.take_turn(LATER) == [seek(1), seek(2), seek(3), seek(4)]


def test_commands_of_a_kind_are_taken_out() -> None:
    """What is taken out is returned, and the rest keeps its order."""
    queue = queue_of(seek(1), offer(2), Release(1, LeaseId(5)), seek(3))
    assert queue.remove((Seek, Offer)) == [seek(1), seek(3), offer(2)]
    assert queue.take_turn(LATER) == [Release(1, LeaseId(5))]
