"""Messages to the service manager, systemd or `kvcached supervise`, which names its socket in ``$NOTIFY_SOCKET``.

A leading ``@`` stands for an abstract one. What the manager does not take in time waits here, in order, and is sent
again with each ping (`kvcached.recovery.watchdog`): memory that the manager was not told to keep ends with the daemon.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from array import array
from collections import deque
from typing import Final, NamedTuple

NOTIFY_VARIABLE: Final = "NOTIFY_SOCKET"
READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"

#: How long a message may wait for room in the manager's queue. A stopped manager must not stop the daemon.
WAIT_S: Final = 2.0

#: Errors that pass when the manager goes on to read: too many descriptors are on their way to it, or no room is left.
_PASSING: Final = frozenset({errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS})

_log: Final = logging.getLogger(__name__)


class _Message(NamedTuple):
    """One message.

    Attributes:
        state: its lines.
        descriptor: goes with it; None if there is none.
    """

    state: str
    descriptor: int | None = None


class _Outbox:
    """What one manager is sent.

    Attributes:
        unsent: what waits, oldest first, with descriptors of its own: the caller may close its before they are sent.
            What a manager is not to keep any more is withdrawn, so that there is no more than the daemon has.
    """

    def __init__(self, address: str) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.unsent: deque[_Message] = deque()

    def put(self, message: _Message, instead_of: str) -> bool:
        """Send a message behind those that wait, or keep it; returns whether it was sent. See `notify`.

        A manager that was waited for once is not before it has taken what waits: a pool of many parts would keep the
        daemon from everything else for minutes.
        """
        self.send_unsent()
        is_deaf = bool(self.unsent)
        self._withdraw(instead_of)
        if not is_deaf:
            try:
                self.send(message, WAIT_S)
            except OSError as error:
                if not _is_passing(error):
                    _note_lost(message, error)
                    return False
                _log.warning("the service manager takes no messages; they are sent again until it does: %s", error)
            else:
                return True
        self._keep(message)
        return False

    def send(self, message: _Message, wait_s: float) -> None:
        """Send a message before any that wait.

        Raises:
            OSError: it was not sent.
        """
        descriptors = [] if message.descriptor is None else [message.descriptor]
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(wait_s)
            sender.sendmsg([message.state.encode()], ancillary, 0, self._address)

    def send_unsent(self) -> None:
        """Send what waits, as far as the manager takes it. Does not wait for it."""
        had = len(self.unsent)
        while self.unsent:
            try:
                self.send(self.unsent[0], 0)
            except OSError as error:
                if _is_passing(error):
                    return
                _note_lost(self.unsent[0], error)
            _close(self.unsent.popleft())
        if had:
            _log.info("the service manager takes messages again: none is unsent")

    def _withdraw(self, line: str) -> None:
        """Drop what waits and has this line."""
        dropped = [each for each in self.unsent if line in each.state.split("\n")]
        for each in dropped:
            self.unsent.remove(each)
            _close(each)

    def _keep(self, message: _Message) -> None:
        if message.descriptor is None:
            if message not in self.unsent:
                self.unsent.append(message)
            return
        try:
            self.unsent.append(message._replace(descriptor=os.dup(message.descriptor)))
        except OSError as error:
            _note_lost(message, error)


#: By the address of the manager: a process has one.
_outboxes: Final[dict[str, _Outbox]] = {}


def notify(state: str, descriptor: int | None = None, *, instead_of: str = "") -> bool:
    """Send `state`, with a duplicate of a descriptor, to the service manager. Does nothing without a manager.

    What a manager does not take within `WAIT_S` is sent again later. If it cannot be reached at all, that is logged and
    the daemon continues: the manager decides what a missing message means.

    Args:
        state: the lines of the message.
        descriptor: goes with it, and stays the caller's.
        instead_of: a line. What waits and has it is dropped.

    Returns:
        Whether the message was sent. The manager does not acknowledge it.
    """
    outbox = _outbox()
    return outbox is not None and outbox.put(_Message(state, descriptor), instead_of)


def notify_now(state: str, descriptor: int | None = None, *, wait_s: float = 0) -> bool:
    """As `notify`, for what is worth nothing later: it does not wait, and goes before what does. Returns the same."""
    outbox = _outbox()
    if outbox is None:
        return False
    message = _Message(state, descriptor)
    try:
        outbox.send(message, wait_s)
    except OSError as error:
        if not outbox.unsent:  # else the log says already that the manager takes nothing
            _note_lost(message, error)
        return False
    return True


def send_unsent() -> None:
    """Send what a manager has not taken before, as far as it takes it now."""
    if (outbox := _outbox()) is not None:
        outbox.send_unsent()


def unsent() -> int:
    """How many messages the manager has not taken yet."""
    outbox = _outbox()
    return 0 if outbox is None else len(outbox.unsent)


def _outbox() -> _Outbox | None:
    """That of the manager; None without one."""
    address = os.environ.get(NOTIFY_VARIABLE, "")
    if not address:
        return None
    if address not in _outboxes:
        _outboxes[address] = _Outbox(address)
    return _outboxes[address]


def _is_passing(error: OSError) -> bool:
    return isinstance(error, TimeoutError) or error.errno in _PASSING


def _note_lost(message: _Message, error: OSError) -> None:
    _log.warning("%s not sent to %s: %s", message.state.replace("\n", " "), NOTIFY_VARIABLE, error)


def _close(message: _Message) -> None:
    if message.descriptor is not None:
        os.close(message.descriptor)
