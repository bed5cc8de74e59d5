"""Failpoints: named places in the product where a test can make a process die, stop or fail. Otherwise they do nothing.

The variable ``KVCACHED_FAILPOINTS`` arms failpoints when a process starts: ``name=action@n``, separated by commas. When
the process reaches the failpoint for the n-th time (without ``@n``: the first time), one action happens, once:

    kill    SIGKILL to itself
    stop    SIGSTOP to itself; it continues after SIGCONT
    raise   `FailpointReached`
    pass    nothing

Before the action, the failpoint's name is written to the file in ``KVCACHED_FAILPOINTS_LOG``. A failpoint whose name is
in the file does nothing in any process: child processes inherit the variables, but only one process is to fail.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

VARIABLE: Final = "KVCACHED_FAILPOINTS"
LOG_VARIABLE: Final = "KVCACHED_FAILPOINTS_LOG"

#: Every failpoint, and the state in which a process reaches it.
FAILPOINTS: Final[dict[str, str]] = {
    "offload.load.copied": "a shard has loaded blocks, and has not reported it",
    "offload.load.prepared": "the engine knows which host slots to read, and has read none",
    "offload.store.prepared": "the engine knows which host slots to write, and has written none",
    "offload.store.written": "all headers of a store are written, and the shard has not reported it",
    "blocks.copy": "before each layer of a worker's load, and before each batch of blocks of any other copy, also in a "
    "shard of an engine in offload mode",
    "blocks.store.cleared": "a store has cleared the headers of its host slots, and has copied no byte",
    "blocks.store.copied": "a store has copied all bytes, and has written no header",
    "blocks.store.header": "before each header of a store, after all bytes are copied",
    "client.acquired": "a lease is granted, and the engine does not have it yet",
    "client.commit": "blocks are written, and no commit has been sent",
    "client.heartbeat": "a heartbeat is due",
    "client.load": "a hit is loading, and the engine has not asked for the end of the load",
    "client.sent": "a commit, an allocate or a release is sent, and its reply has not been read",
    "daemon.asleep": "the state file says that a device pool sleeps, and the pool has its memory",
    "daemon.attach": "a process was accepted to identify itself or to join a session, and has no reply",
    "daemon.emptied": "a device pool that falls asleep holds nothing, and the state file says that it is awake",
    "daemon.ledger.write": "a new state file is written, and has not replaced the old one",
    "daemon.ledger.written": "a new state file has replaced the old one, and no peer knows its content",
    "daemon.made": "a device pool that wakes has memory and workers, and the state file says that it sleeps",
    "daemon.order": "the core has ordered a copy, and no worker has the order",
    "daemon.renewed": "a namespace is cleared or has other weights, the state file says so, and no peer was informed",
    "daemon.reply": "a request was carried out, and its reply is not sent",
    "daemon.request": "a request was read, and not carried out",
    "worker.ack": "a worker has carried out a command, and has not reported it",
    "worker.load.begin": "a worker has the command for a load, and has read no header",
    "worker.load.copied": "a worker has copied the bytes of a load, and its progress entry does not show it",
    "worker.store.begin": "a worker has the command for a store, and has written nothing",
    "worker.store.written": "a worker has written all headers of a store, and has not reported it",
}

_log: Final = logging.getLogger("kvcached_client")


class FailpointReached(RuntimeError):
    """The exception of the action ``raise``, which no code expects."""


class _Armed:
    """The action at one failpoint."""

    __slots__ = ("action", "passes_left")

    def __init__(self, action: str, passes: int) -> None:
        self.action = action
        self.passes_left = passes


def failpoint(name: str) -> None:
    """Carry out the action that is armed for this failpoint, if any."""
    if _ARMED is not None:
        _reach(_ARMED, name)


def parse(text: str) -> dict[str, tuple[str, int]]:
    """The action of each failpoint, and the number of the pass at which it happens.

    Raises:
        ValueError: an unknown failpoint or action (the message lists the known ones), or a pass below 1.
    """
    asked: dict[str, tuple[str, int]] = {}
    for entry in filter(None, text.split(",")):
        name, _, rest = entry.partition("=")
        action, at, number = rest.partition("@")
        if name not in FAILPOINTS:
            raise ValueError(f"{VARIABLE}: no failpoint {name!r}; there are: {', '.join(FAILPOINTS)}")
        if action not in _ACTIONS:
            raise ValueError(f"{VARIABLE}: {entry!r}: no action {action!r}; there are: {', '.join(_ACTIONS)}")
        if at and not (number.isdecimal() and int(number)):
            raise ValueError(f"{VARIABLE}: {entry!r}: name the pass as a number from 1 on, as in {name}={action}@2")
        asked[name] = (action, int(number or 1))
    return asked


def _reach(armed: dict[str, _Armed], name: str) -> None:
    plan = armed.get(name)
    if plan is None:
        return
    with _COUNTING:
        plan.passes_left -= 1
        if plan.passes_left:
            return
    if _note(name):
        _ACTIONS[plan.action](name)


def _note(name: str) -> bool:
    """Write a name to the log; returns False if the log has the name already."""
    path = os.environ.get(LOG_VARIABLE, "")
    if not path:
        return True
    with Path(path).open("a+") as log:
        fcntl.flock(log, fcntl.LOCK_EX)  # until the file is closed, with the name written
        log.seek(0)
        if name in log.read().split():
            return False
        log.write(f"{name}\n")
    return True


def _signal_self(number: signal.Signals) -> None:
    # To this thread, so that the call does not return before the process is stopped.
    signal.pthread_kill(threading.get_ident(), number)


def _raise(name: str) -> None:
    raise FailpointReached(f"failpoint {name}")


_ACTIONS: Final[dict[str, Callable[[str], None]]] = {
    "kill": lambda _: _signal_self(signal.SIGKILL),
    "stop": lambda _: _signal_self(signal.SIGSTOP),
    "raise": _raise,
    "pass": lambda _: None,
}
_COUNTING: Final = threading.Lock()


def _armed() -> dict[str, _Armed] | None:
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    _log.warning("%s is set: this process will fail on purpose: %s", VARIABLE, text)
    return {name: _Armed(action, passes) for name, (action, passes) in parse(text).items()}


_ARMED: Final = _armed()
