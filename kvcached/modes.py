"""Whether the daemon takes new work: serving, draining, stopping."""

from __future__ import annotations

import logging
from typing import Final

from kvcached.core.states import DAEMON_TRANSITIONS, DaemonState
from kvcached_client.errors import ErrorCode, RequestError, request_error

_log: Final = logging.getLogger(__name__)


class Modes:
    """The daemon's state, and what it refuses in it.

    Attributes:
        state: see `DaemonState`.
    """

    def __init__(self) -> None:
        self.state = DaemonState.SERVING

    @property
    def takes_work(self) -> bool:
        """Whether there may be new sessions and leases."""
        return self.state is DaemonState.SERVING

    def go(self, state: DaemonState) -> bool:
        """Enter a state, if an edge of the table leads there; whether it did."""
        if (self.state, state) not in DAEMON_TRANSITIONS:
            return False
        _log.info("the daemon was %s, it is %s now", self.state, state)
        self.state = state
        return True

    def check(self) -> None:
        """Refuse new work where none is taken.

        Raises:
            DaemonFailure: `draining`.
        """
        if not self.takes_work:
            raise self.refusal()

    def refusal(self) -> RequestError:
        """What is told to who comes with new work, or waits until the end."""
        return request_error(
            ErrorCode.DRAINING, f"the daemon is {self.state}", "wait until it serves again, or use another daemon"
        )
