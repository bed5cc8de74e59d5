"""What a process asks of the kernel about its parent and its children."""

from __future__ import annotations

import ctypes
import os
from typing import Final

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36

_libc: Final = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """Set one of the two.

    Raises:
        OSError: the kernel refused.
    """
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl {option}: {os.strerror(number)}")
