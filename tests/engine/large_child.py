"""A program with a child that takes its time to die: ``python -m tests.engine.large_child``. Prints the child's pid."""

from __future__ import annotations

import mmap
import os
import signal
import sys

_SIZE_BYTES = 1 << 30


def main() -> None:
    """Wait for a signal, and so does the child, with memory that the kernel has to free page by page."""
    ready, told = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the parent's end is the end of its output
        memory = mmap.mmap(-1, _SIZE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
        os.write(told, b"!")
        signal.pause()
        memory.close()
    os.read(ready, 1)
    print(child, flush=True)  # noqa: T201
    signal.pause()


if __name__ == "__main__":
    main()
