"""What a child process was asked and has not reported, and when it is late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvcached.process.in_flight import InFlight
from tests.virtual_time import VirtualTimeLoop

Flights = InFlight[str, None]


def play(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run on a clock that goes on by itself."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())


def ignore(_: None) -> None:
    """Nobody waits for it."""


@pytest.mark.parametrize(("turns", "late_s"), [(1, {1: 5, 2: None}), (2, {1: 5, 2: 1}), (None, {1: None, 2: 1})])
def test_short_deadline_behind_a_long_one_is_noticed(turns: int | None, late_s: dict[int, int | None]) -> None:
    """A request that is under way is late at its own deadline, however long one before it may take.

    Where the process chooses the order, the end of the short request gives the long one its whole time again.
    """

    async def main() -> None:
        loop, told = asyncio.get_running_loop(), dict[int, float]()
        began_s = loop.time()

        def note(late: list[int]) -> None:
            for number in late:
                told.setdefault(number, round(loop.time() - began_s, 3))
                flights.done(number)
            flights.watch(0)

        flights = Flights(note, turns)
        flights.add("long", ignore, 5)
        flights.add("short", ignore, 1)
        await asyncio.sleep(5.5)
        assert told == {number: at_s for number, at_s in late_s.items() if at_s is not None}

    play(main)


def test_request_that_gets_its_turn_is_watched() -> None:
    """A request is under way from when the one before it is over: its deadline counts from there."""

    async def main() -> None:
        late: list[int] = []
        flights = Flights(late.extend, 1)
        flights.add("long", ignore, 600)
        flights.add("short", ignore, 1)
        await asyncio.sleep(100)
        assert flights.done(1) is not None
        await asyncio.sleep(0.9)
        assert late == []
        await asyncio.sleep(0.2)
        assert late == [2]

    play(main)


def test_request_that_gets_on_is_not_late() -> None:
    """A request is late so long after its last report of progress; one that waits for its turn makes none."""

    async def main() -> None:
        late: list[int] = []
        flights = Flights(late.extend, 1)
        flights.add("long", ignore, 1)
        flights.add("waits", ignore, 1)
        for _ in range(5):
            await asyncio.sleep(0.9)
            flights.progressed(1)
            flights.progressed(2)
            flights.progressed(3)
        assert late == []
        await asyncio.sleep(0.95)
        assert late == []
        await asyncio.sleep(0.1)
        assert late == [1]

    play(main)


def test_each_report_is_of_one_open_request() -> None:
    """A request is over once; one that was never sent, or is over, is none."""

    async def main() -> None:
        flights = Flights(lambda _: None)
        flights.add("only", ignore, 1)
        assert (1 in flights, len(flights), flights.next_number) == (True, 1, 2)
        found = flights.done(1)
        assert found is not None
        assert found.request == "only"
        assert flights.done(1) is flights.done(2) is None
        flights.add("left", ignore, 1)
        assert [each.request for each in flights.clear()] == ["left"]
        assert len(flights) == 0

    play(main)
