"""A daemon whose workers fail when a test says so: ``python -m tests.daemon.faulty_daemon serve …``.

The file `FAULT` in the run directory names the worker by its pid, and what befalls it in the middle of its next copies:
"fail" fails a store whose bytes are there and whose headers are not, "stop" stops the whole worker in a load, behind a
layer.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import kvcached.__main__
from kvcached.memory.sealed import SharedMemory
from kvcached.worker import group, pool_memory
from kvcached.worker import main as worker_main
from kvcached_client.blocks.copy import Batch, MemoryCopier

FAULT = "fault"


class FaultyCopier(MemoryCopier):
    """Copies until it is told not to."""

    fault = Path()

    def copy(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in super().copy(batches):
            yield batch
            if self._befalls("stop"):
                # To this very thread: it does not return from the call before the process goes on.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    def copy_summed(self, batches: Iterable[Batch], per_sum: int) -> Iterator[bytes]:
        for sums in super().copy_summed(batches, per_sum):
            if self._befalls("fail"):
                raise OSError("the store was made to fail")
            yield sums

    def _befalls(self, what: str) -> bool:
        return self.fault.exists() and self.fault.read_text() == f"{os.getpid()} {what}"


class FaultyMemory(pool_memory.CpuMemory):
    """Memory of this machine, copied by such a copier."""

    def __init__(self, memory: SharedMemory) -> None:
        super().__init__(memory)
        self.copier = FaultyCopier()


def main(arguments: list[str]) -> int:
    """Be a daemon, or one of its workers: ``worker FAULT FD``."""
    if arguments[1] == "worker":
        FaultyCopier.fault = Path(arguments[2])
        pool_memory.CpuMemory = FaultyMemory  # type: ignore[misc]
        return worker_main.main([arguments[0], arguments[3]])
    fault = Path(arguments[arguments.index("--run-dir") + 1]) / FAULT
    group.WORKER_COMMAND = (sys.executable, "-m", __spec__.name, "worker", str(fault))  # type: ignore[misc,assignment]
    kvcached.__main__.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
