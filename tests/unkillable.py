"""A process that SIGKILL does not end for a while, like one that waits in the kernel for a disk that hangs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import pytest

_PTRACE_SEIZE: Final = 0x4206
_PTRACE_DETACH: Final = 17
_PTRACE_O_TRACEEXIT: Final = 0x40

_libc: Final = ctypes.CDLL(None, use_errno=True)


@contextmanager
def unkillable(pid: int) -> Iterator[None]:
    """Keep a process, which may go on, from ending: as its tracer, which has it stop where the kernel begins to end it.

    There it has all its descriptors, locks and mappings. It ends when this is left, in the same thread.
    """
    try:
        _ptrace(_PTRACE_SEIZE, pid, _PTRACE_O_TRACEEXIT)
    except PermissionError:
        pytest.skip("this machine lets nobody trace processes")
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it has not stopped: nobody has tried to end it, and nobody traces it soon
            _ptrace(_PTRACE_DETACH, pid, 0)


def _ptrace(request: int, pid: int, data: int) -> None:
    if _libc.ptrace(request, pid, None, ctypes.c_void_p(data)):
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace {request:#x} of {pid}: {os.strerror(number)}")
