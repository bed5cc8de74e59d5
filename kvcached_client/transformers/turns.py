"""Calls of several threads, one after the other."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from typing import Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Turns:
    """What has methods that take turns: a thread that calls one waits until no other thread is inside any of them."""

    def __init__(self) -> None:
        self._process_id = os.getpid()
        self._turn = threading.Lock()
        self._user = 0  #: the thread that is inside; 0 if none is

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that made this, whose other threads do not exist here."""
        return os.getpid() != self._process_id


G = TypeVar("G", bound=Turns)


def by_turns(call: Callable[Concatenate[G, P], T]) -> Callable[Concatenate[G, P], T]:
    """A method that takes turns with the others.

    It raises RuntimeError where its turn would never come: in a forked child, because a thread that was inside is not
    there, and in a signal handler that has interrupted one of these methods, which goes on when the handler returns.
    """

    @wraps(call)
    def waiting(self: G, /, *args: P.args, **kwargs: P.kwargs) -> T:
        name, thread = type(self).__name__, get_ident()
        if self.is_forked:
            raise RuntimeError(f"this {name} belongs to process {self._process_id}: a forked child connects its own")
        if self._user == thread:
            raise RuntimeError(
                f"a signal handler has called this {name} while its thread is inside a call: let the handler raise an "
                "exception or set a flag, and call it behind that"
            )
        with self._turn:
            self._user = thread
            try:
                return call(self, *args, **kwargs)
            finally:
                self._user = 0

    return waiting
