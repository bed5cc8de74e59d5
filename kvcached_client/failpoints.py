"""Named places in the product where a test lets a process die, stop or fail. They do nothing unless a test asks.

``KVCACHED_FAILPOINTS`` arms some of them when a process starts: ``name=action@n``, with commas between several. When
the process comes by for the n-th time (without ``@n`` the first), one of these happens, once:

    kill    SIGKILL to itself
    stop    SIGSTOP to itself: it goes on after SIGCONT
    raise   `FailpointReached`
    pass    nothing

``KVCACHED_FAILPOINTS_LOG`` names a file that the name is written to before. A name that the file has already does
nothing more, in no process: the variables are inherited, and one fault is to befall one process.
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

#: Every failpoint, and what is true when a process comes by.
FAILPOINTS: Final[dict[str, str]] = {
    "offload.load.copied": "it has copied what it was to load, and the daemon does not know",
    "offload.load.prepared": "it knows which host slots to read, and has read none",
    "offload.store.prepared": "it knows which host slots to write, and has touched none",
    "offload.store.written": "all headers of a store are there, and the daemon does not know",
    "blocks.copy": "a worker, or an engine in offload mode, copies: before each layer of a worker's load, and before "
    "each part of the blocks of any other copy",
    "blocks.store.cleared": "the headers of the host slots that a store is to write are gone, and no byte is there",
    "blocks.store.copied": "the bytes of a store are there, and no header",
    "blocks.store.header": "before each header of a store, all its bytes being there",
    "client.acquired": "a lease is granted, and the engine does not know it yet",
    "client.commit": "blocks are written, and no commit has been sent",
    "client.heartbeat": "a heartbeat is due",
    "client.load": "a hit is on its way, and nobody has asked for its end",
    "client.sent": "a commit, an allocate or a release is on its way, and no answer has been read",
    "daemon.attach": "a process has been let in, to introduce itself or to join a session, and has no answer",
    "daemon.ledger.write": "a new ledger is written, and the old one is in its place",
    "daemon.ledger.written": "a new ledger is in its place, and nobody has heard of what it says",
    "daemon.order": "the core wants a copy, and no worker knows",
    "daemon.renewed": "a namespace is cleared or has other weights, the ledger says so, and nobody has been told",
    "daemon.reply": "a request has had its effect, and there is no reply",
    "daemon.request": "a request has been read, and nothing is done about it",
    "worker.ack": "a command is over in a worker, and the daemon does not know",
    "worker.load.begin": "a load has its command, and no header has been looked at",
    "worker.load.copied": "the bytes of a load are on the device, and its progress entry does not say so",
    "worker.store.begin": "a store has its command, and has touched nothing",
    "worker.store.written": "all headers of a store are there, and nobody has been told",
}

_log: Final = logging.getLogger("kvcached_client")


class FailpointReached(RuntimeError):
    """What the action ``raise`` raises: an error that no code expects."""


class _Armed:
    """What is to happen at one failpoint."""

    __slots__ = ("action", "passes_left")

    def __init__(self, action: str, passes: int) -> None:
        self.action = action
        self.passes_left = passes


def failpoint(name: str) -> None:
    """Let happen what was asked for at this place, if anything was."""
    if _ARMED is not None:
        _reach(_ARMED, name)


def parse(text: str) -> dict[str, tuple[str, int]]:
    """What to do at which failpoint, and at which pass.

    Raises:
        ValueError: there is no such failpoint or action, or a pass is no number from 1 on; says which there are.
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
    """Write a name to the log; False where it is there already."""
    path = os.environ.get(LOG_VARIABLE, "")
    if not path:
        return True
    with Path(path).open("a+") as log:
        fcntl.flock(log, fcntl.LOCK_EX)  # until it is closed, and what was written is there
        log.seek(0)
        if name in log.read().split():
            return False
        log.write(f"{name}\n")
    return True


def _signal_self(number: signal.Signals) -> None:
    # To this very thread: it does not return from the call before the process is stopped.
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
