"""What storage has still to forget is requested once, however often storage is opened meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from kvcached.storage.link_state import LinkState
from kvcached.storage.messages import Forget
from tests.storage.test_link import PREFIX, Rig, rig  # noqa: F401


def test_prefix_that_is_due_is_requested_once_however_often_storage_opens(rig: Rig) -> None:  # noqa: F811
    """The record names it at each opening; one request is under way, and one after each failure."""
    told: list[int] = []

    def take_in() -> None:
        rig.link.forget(PREFIX, lambda over: told.append(over.count))

    def open_again(go_on: Callable[[], None]) -> None:
        take_in()
        go_on()

    rig.link.before_ready = open_again
    take_in()
    for _ in range(4):
        rig.restart()
        rig.clock.pass_s(2)
        assert len(rig.process.forgets()) == 1
    for _ in range(3):
        rig.process.answer(rig.process.forgets()[0], "EIO")
        rig.clock.pass_s(5)
        assert len(rig.process.forgets()) == 1
    rig.process.answer(rig.process.forgets()[0])

    assert (told, list(rig.link.due), rig.link.state) == ([0], [], LinkState.READY)
    assert rig.process.forgets() == []
    take_in()
    assert len(rig.process.forgets()) == 1


def test_prefixes_are_forgotten_one_after_the_other(rig: Rig) -> None:  # noqa: F811
    """Each may take minutes in a service, and a thread that fetches need."""
    for number in range(3):
        rig.link.forget(bytes([number]) * 16, lambda _: None)
    sent = []
    for _ in range(3):
        (order,) = rig.process.forgets()
        assert isinstance(order, Forget)
        sent.append(order.prefix[0])
        rig.process.answer(order)

    assert (sent, list(rig.link.due), rig.process.forgets()) == ([0, 1, 2], [], [])
