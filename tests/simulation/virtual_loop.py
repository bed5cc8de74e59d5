"""The event loop of a simulated daemon, as far as the product asks one for the time, for timers and for tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from tests.simulation.daemon import Daemon
    from tests.simulation.world import World


class Timer:
    """A call that is to come, unless it is called off, even if it was due already while the daemon was stopped."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call

    def cancel(self) -> None:
        self._call = None

    def is_due(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()


class Task:
    """A coroutine that runs in the daemon's process."""

    def __init__(self) -> None:
        self._told: list[Callable[[Task], object]] = []

    def add_done_callback(self, call: Callable[[Task], object]) -> None:
        self._told.append(call)

    def is_done(self) -> None:
        for call in self._told:
            call(self)


class VirtualLoop:
    """One daemon's. After each call everything is looked at, as after each message."""

    def __init__(self, world: World, daemon: Daemon) -> None:
        self._world = world
        self._daemon = daemon

    def run(self) -> None:
        """This thread's loop is this one, until another one or `none_runs`."""
        asyncio._set_running_loop(cast("asyncio.AbstractEventLoop", self))

    def time(self) -> float:
        return self._world.scheduler.now_us / 1e6

    def call_soon(self, call: Callable[..., object], *args: Any) -> Timer:
        return self.call_later(0, call, *args)

    def call_at(self, at_s: float, call: Callable[..., object], *args: Any) -> Timer:
        return self.call_later(max(at_s - self.time(), 0), call, *args)

    def call_later(self, delay_s: float, call: Callable[..., object], *args: Any) -> Timer:
        timer = Timer(lambda: call(*args))
        # Rounded up: what compares the time with its deadline must not find that it is early.
        delay_us = -int(-delay_s * 1e6 // 1)
        self._daemon.process.after(delay_us, "a timer of the daemon is due", self._daemon.checked(timer.is_due))
        return timer

    def create_task(self, coroutine: Coroutine[Any, Any, None]) -> Task:
        task = Task()

        async def run() -> None:
            await coroutine
            task.is_done()

        self.call_soon(lambda: self._daemon.process.start(run()))
        return task


def none_runs() -> None:
    """No loop is this thread's."""
    asyncio._set_running_loop(None)
