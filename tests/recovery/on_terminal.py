"""``python -m tests.recovery.on_terminal <command>...``: becomes a command whose terminal is the one at stdin."""

from __future__ import annotations

import fcntl
import os
import sys
import termios

if __name__ == "__main__":
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - without a shell is what is wanted
