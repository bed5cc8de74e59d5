"""``python -m kvcached``, and what the command ``kvcached`` starts.

Imports nothing but the standard library at first, so that Ctrl-C ends it in order from its first moment on.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType


def run() -> None:
    """Run the command line. SIGINT ends it with status 130 and without a traceback, wherever it is."""
    signal.signal(signal.SIGINT, _end)
    from kvcached.cli import main  # noqa: PLC0415 - takes a tenth of a second, in which Ctrl-C may come

    main()


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    run()
