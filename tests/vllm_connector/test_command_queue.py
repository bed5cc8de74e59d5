"""Commands that wait for the link's thread."""

from __future__ import annotations

from kvcached_client.types import LeaseId
from kvcached_client.vllm.commands import OTHERS_PER_TURN_MAX, SEEKS_PER_TURN_MAX, CommandQueue, Offer, Release, Seek
from tests.vllm_connector.link_rig import offer, seek


def queue_of(*commands: Seek | Offer | Release) -> CommandQueue:
    queue = CommandQueue()
    for command in commands:
        queue.put(command)
    return queue


def test_seeks_that_a_request_waits_for_go_first() -> None:
    """Seeks with a load come first, in their order; all other commands follow, in theirs."""
    queue = queue_of(offer(1), seek(2, load=False), seek(3), Release(1, LeaseId(5)), seek(4))
    assert queue.take_turn() == [seek(3), seek(4), offer(1), seek(2, load=False), Release(1, LeaseId(5))]
    assert len(queue) == 0


def test_others_have_their_turn_beside_any_number_of_seeks() -> None:
    """However many seeks wait, each turn has some of the other commands, so that blocks and leases come free."""
    queue = queue_of(*(offer(ticket) for ticket in range(2 * OTHERS_PER_TURN_MAX)))
    offers: list[object] = []
    for _ in range(2):
        for ticket in range(2 * SEEKS_PER_TURN_MAX):
            queue.put(seek(ticket))
        turn = queue.take_turn()
        assert len(turn) == SEEKS_PER_TURN_MAX + OTHERS_PER_TURN_MAX
        offers += [command for command in turn if isinstance(command, Offer)]
    assert offers == [offer(ticket) for ticket in range(2 * OTHERS_PER_TURN_MAX)]


def test_seeks_that_are_put_back_are_first_again() -> None:
    """Seeks that could not be carried out keep their order, before those that came since."""
    queue = queue_of(seek(1), seek(2), seek(3))
    turn = queue.take_turn()
    queue.put(seek(4))
    queue.put_back([each for each in turn if isinstance(each, Seek)])
    assert queue.take_turn() == [seek(1), seek(2), seek(3), seek(4)]


def test_commands_of_a_kind_are_taken_out() -> None:
    """What is taken out is returned, and the rest keeps its order."""
    queue = queue_of(seek(1), offer(2), Release(1, LeaseId(5)), seek(3))
    assert queue.remove((Seek, Offer)) == [seek(1), seek(3), offer(2)]
    assert queue.take_turn() == [Release(1, LeaseId(5))]
