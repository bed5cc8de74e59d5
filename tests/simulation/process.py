"""Processes of the simulated machine: they do one thing after the other, and can be stopped, go on, and be killed."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar, cast

from kvcached.process.identity import ProcessIdentity
from tests.simulation.scheduler import Event, Scheduler

T = TypeVar("T")
#: Between two things that a process has left undone while it was stopped.
_CATCH_UP_US = 20


class Outcome(Generic[T]):
    """Something that a coroutine waits for."""

    def __init__(self) -> None:
        self.done = False
        self._value: T | None = None
        self._error: Exception | None = None
        self._waiting: list[Callable[[], None]] = []

    def set(self, value: T) -> None:
        """It has come. What comes later changes nothing."""
        self._end(value, None)

    def fail(self, error: Exception) -> None:
        """It will not come: who waits gets this error."""
        self._end(None, error)

    def _end(self, value: T | None, error: Exception | None) -> None:
        if self.done:
            return
        self.done, self._value, self._error = True, value, error
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()

    def subscribe(self, wake: Callable[[], None]) -> None:
        self._waiting.append(wake)

    def __await__(self) -> Generator[Outcome[T], None, T]:
        if not self.done:
            yield self
        if self._error is not None:
            raise self._error
        return cast("T", self._value)


class Process:
    """A process, which is also what the daemon sees of it by its pidfd.

    Attributes:
        stopped: by SIGSTOP: what it was to do waits until it goes on.
        dead: nothing of it happens any more.
        on_death: told when it dies.
    """

    def __init__(self, scheduler: Scheduler, name: str, pid: int) -> None:
        self.scheduler = scheduler
        self.name = name
        self.pid = pid
        self.stopped = False
        self.dead = False
        self.on_death: list[Callable[[], None]] = []
        self._undone: list[Callable[[], None]] = []
        self._coroutines: list[Coroutine[Any, Any, None]] = []
        self._running: Coroutine[Any, Any, None] | None = None

    @property
    def identity(self) -> ProcessIdentity:
        """What tells it from later processes with its id."""
        return ProcessIdentity(pid=self.pid, started=self.pid)

    def after(self, delay_us: int, what: str, action: Callable[[], None]) -> Event:
        """Plan something that this process does."""
        return self.scheduler.after(delay_us, f"{self.name}: {what}", lambda: self.do(action))

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Begin to run a coroutine. An error that leaves it ends the simulation."""
        if self.dead:
            coroutine.close()
            return
        self._coroutines.append(coroutine)
        self.do(lambda: self._advance(coroutine))

    async def sleep(self, delay_us: int, what: str) -> None:
        """Let time pass."""
        over: Outcome[None] = Outcome()
        self.after(delay_us, what, lambda: over.set(None))
        await over

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True

    def go_on(self) -> None:
        """SIGCONT. What it has left undone it does now, in the same order."""
        if not self.stopped or self.dead:
            return
        self.stopped = False
        undone, self._undone = self._undone, []
        for index, action in enumerate(undone):
            self.after(index * _CATCH_UP_US, "catches up", action)

    def kill(self) -> None:
        """SIGKILL, or its own end."""
        if self.dead:
            return
        self.dead = True
        self.forget()
        for tell in self.on_death:
            tell()

    def forget(self) -> None:
        """Nothing that it was about to do will be done."""
        self._undone.clear()
        for coroutine in self._coroutines:
            if coroutine is not self._running:
                coroutine.close()
        self._coroutines.clear()

    def do(self, action: Callable[[], None]) -> None:
        if self.stopped:
            self._undone.append(action)
        elif not self.dead:
            action()

    def _advance(self, coroutine: Coroutine[Any, Any, None]) -> None:
        if coroutine not in self._coroutines:
            return  # forgotten, while something that wakes it was on its way
        before, self._running = self._running, coroutine
        try:
            awaited: Outcome[Any] = coroutine.send(None)
        except StopIteration:
            if coroutine in self._coroutines:
                self._coroutines.remove(coroutine)
            return
        finally:
            self._running = before
        awaited.subscribe(lambda: self.do(lambda: self._advance(coroutine)))


class Mailbox(Generic[T]):
    """Things for one coroutine to do, in order."""

    def __init__(self) -> None:
        self.items: list[T] = []
        self._news: Outcome[None] = Outcome()

    def put(self, item: T) -> None:
        self.items.append(item)
        self._news.set(None)

    async def get(self, index: Callable[[list[T]], int] = lambda _: 0) -> T:
        """Take out the first, or the one that `index` chooses; waits while there is none."""
        while not self.items:
            self._news = Outcome()
            await self._news
        return self.items.pop(index(self.items))


async def every(outcomes: list[Outcome[T]]) -> list[T]:
    """Wait for all of them."""
    return [await outcome for outcome in outcomes]
