"""Why a daemon does not start, and what it starts without."""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass
from typing import Final

from kvcached.worker.cuda_maker import NoCudaMemory
from kvcached_client.errors import ErrorCode, RequestError, request_error

log = logging.getLogger(__name__)


class StartError(Exception):
    """The daemon could not start; nothing of it is left."""


class WrongSetup(StartError):
    """It will not start until somebody changes the configuration, or the machine."""


class LedgerUnusable(Exception):
    """A start failed with what an earlier daemon left, and may succeed without it."""


def start_error(error: Exception) -> StartError:
    """What an error means for the start, in words for the operator."""
    is_permanent = isinstance(error, NoCudaMemory) and error.is_permanent
    words = str(error)
    if isinstance(error, OSError) and error.strerror and error.filename is None:
        words = error.strerror  # without the number before it
    return (WrongSetup if is_permanent else StartError)(words)


@dataclass(frozen=True, slots=True)
class Door:
    """What a daemon opens beside its local sockets, if that is configured.

    Attributes:
        table: of the configuration.
        key: that says where; empty where the errors begin with it.
        drop_in: the file in `configs/` with what the unit lacks for it.
        packages: what it needs, as pip takes it; empty where it needs nothing.
        loss: what there is not while it stays closed.
        fix: what to do where the place cannot be bound; empty where the errors say it.
    """

    table: str
    key: str
    drop_in: str
    packages: str
    loss: str
    fix: str = ""

    def stay_closed(self, error: OSError | ImportError | RequestError, *, is_takeover: bool) -> None:
        """Fail the start, or go on without: neither a port nor a package is a reason to lose memory.

        Args:
            error: why it cannot be opened.
            is_takeover: whether the daemon has taken over an earlier one's memory, which it serves all the same.

        Raises:
            OSError: the place cannot be bound; as the next one, in words for the operator.
            RequestError: a package is missing, or a file cannot be used.
        """
        if is_takeover:
            log.error("%s; %s until the next start", self._in_words(error), self.loss)
        elif isinstance(error, OSError):
            raise OSError(error.errno, self._in_words(error)) from error
        elif isinstance(error, ImportError):
            raise request_error(ErrorCode.INTERNAL, f"{self._place}{error}", self._install) from error
        else:
            raise error

    @property
    def _place(self) -> str:
        return f"{self.table} {self.key}: " if self.key else f"{self.table} "

    @property
    def _install(self) -> str:
        return f"pip install {self.packages}"

    def _in_words(self, error: OSError | ImportError | RequestError) -> str:
        if isinstance(error, RequestError):
            return f"{self.table} {error.message}; {error.fix}"
        if isinstance(error, ImportError):
            return f"{self._place}{error}; {self._install}"
        is_forbidden = error.errno == errno.EAFNOSUPPORT
        fix = f"under systemd see configs/{self.drop_in}" if is_forbidden else self.fix
        return f"{self._place}{error.strerror or error}{f'; {fix}' if fix else ''}"


_ELSEWHERE: Final = "stop what listens there, or name an address of this machine that is free"
HTTP: Final = Door("[http]", "listen", "http.conf", "prometheus_client h11", "there are no metrics", _ELSEWHERE)
TCP: Final = Door("[tcp]", "listen", "tcp.conf", "PyNaCl", "other machines are not served", _ELSEWHERE)
EVENTS: Final = Door("[events]", "", "http.conf", "", "there are no events", "make the place free, or name another one")
