"""An engine that only loads, and then does what it must not, by its own knowledge of the kernel: `RUN_DIR INSTANCE`.

Commands: ``load NAME BLOCKS``, ``remap``, ``reopen``, ``stray``. The last one writes a byte, and should be the end.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from functools import partial
from pathlib import Path

from kvcached_client.transport.attach import join_host
from tests.daemon.offload_process import DEADLINE_MS, Scheduler, ShardMemory
from tests.line_process import outcome, say

#: In /proc/self/maps, behind the memory's name.
_READ_ONLY_SHARED = "r--s"


def main() -> None:
    run_dir, instance = sys.argv[1:]
    scheduler = Scheduler(run_dir, bytes.fromhex(instance), 1, 4096, read_only=True)
    memory = ShardMemory(0, 4096)
    memory.join(scheduler.client.session)
    say("joined")
    for command, *words in map(str.split, sys.stdin):
        match command:
            case "load":
                order = scheduler.prepare_load(words[0], int(words[1]))
                say(outcome(partial(memory.load, order)))
            case "remap" | "reopen":
                say(outcome(partial(_again, scheduler, is_reopened=command == "reopen"), OSError))
            case "stray":
                ctypes.memset(_mapping(), 1, 1)
                say("written")


def _again(scheduler: Scheduler, *, is_reopened: bool) -> str:
    """Map the memory once more, to write it: by the descriptor, or by one that is opened by way of it."""
    joined = join_host(scheduler.client.session, 0, deadline_ms=DEADLINE_MS)
    descriptor = os.open(f"/proc/self/fd/{joined.memory}", os.O_RDWR) if is_reopened else joined.memory
    mmap.mmap(descriptor, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE).close()
    return "writable"


def _mapping() -> int:
    """Where the host pool is."""
    (line,) = [each for each in Path("/proc/self/maps").read_text().splitlines() if "kvcached-host" in each]
    assert _READ_ONLY_SHARED in line, line
    return int(line.partition("-")[0], 16)


if __name__ == "__main__":
    main()
