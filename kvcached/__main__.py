"""``python -m kvcached``, and what the command ``kvcached`` starts.

Imports nothing but the standard library at first, so that Ctrl-C ends it in order from its first moment on.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def run() -> None:
    """Run the command line. SIGINT ends it with status 130 and without a traceback, wherever it is."""
    _open_missing_streams()
    signal.signal(signal.SIGINT, _end)
    from kvcached.cli.main import main  # noqa: PLC0415 - takes a tenth of a second, in which Ctrl-C may come

    main()


def _open_missing_streams() -> None:
    """Put /dev/null where stdin, stdout or stderr was closed by whoever started this.

    Otherwise the next files that are opened get these numbers: logs would go into a socket, and libuv aborts when it
    has to close one of them.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the kernel gives the lowest number that is free, which is this one
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - open until the process ends
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    run()
