"""Requests of several threads on one event loop, each call of them with a time limit for all of its requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from kvcached.storage.s3.failures import S3Failure, failure

T = TypeVar("T")


class Calls:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="s3", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run one piece of work; returns its result.

        Raises:
            S3Failure: it failed, or took too long and was ended.
        """
        (outcome,) = self.run_all([work], timeout_s)
        return sure(outcome)

    def run_all(self, works: Sequence[Coroutine[Any, Any, T]], timeout_s: float) -> list[T | BaseException]:
        """Run pieces of work at the same time; returns the result or the error of each.

        What takes too long is ended, and has the result TimeoutError. When this returns, nothing of it runs any more:
        so no piece of work may wait for anything once it is ended.
        """
        return asyncio.run_coroutine_threadsafe(_all(works, timeout_s), self._loop).result()

    def close(self) -> None:
        """End the thread. No call is running."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def sure(outcome: T | BaseException) -> T:
    """The result of a piece of work.

    Raises:
        S3Failure: it failed.
    """
    if isinstance(outcome, BaseException):
        raise S3Failure(failure(outcome)) from outcome
    return outcome


async def _all(works: Sequence[Coroutine[Any, Any, T]], timeout_s: float) -> list[T | BaseException]:
    tasks = [asyncio.ensure_future(work) for work in works]
    if not tasks:
        return []
    _, late = await asyncio.wait(tasks, timeout=timeout_s)
    for task in late:
        task.cancel()
    if late:
        await asyncio.wait(late)
    return [_outcome(task, timeout_s) for task in tasks]


def _outcome(task: asyncio.Task[T], timeout_s: float) -> T | BaseException:
    if task.cancelled():
        return TimeoutError(f"no answer within {timeout_s:g} s")
    error = task.exception()
    return task.result() if error is None else error
