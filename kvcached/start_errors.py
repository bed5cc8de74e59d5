"""Why a daemon does not start."""

from __future__ import annotations

from kvcached.worker.cuda_maker import NoCudaMemory


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
