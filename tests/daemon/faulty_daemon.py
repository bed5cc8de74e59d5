"""A daemon whose workers fail when a test says so: ``python -m tests.daemon.faulty_daemon serve …``.

The file `FAULT` in the run directory names the worker by its pid, and what befalls it in the middle of its next copies,
behind the first layer: "fail" fails a store, "stop" stops the whole worker in a load.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import kvcached.__main__
from kvcached.worker import main as worker_main
from kvcached.worker import process, shard
from kvcached.worker.copier import StripCopies
from kvcached.worker.copier_host import HostCopier

FAULT = "fault"


class FaultyCopier(HostCopier):
    """Copies until it is told not to."""

    fault = Path()

    def to_host(self, strip: StripCopies) -> None:
        if self._befalls("fail", strip):
            raise OSError("the store was made to fail")
        super().to_host(strip)

    def to_device(self, strip: StripCopies) -> None:
        if self._befalls("stop", strip):
            # To this very thread: it does not return from the call before the process goes on.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        super().to_device(strip)

    def _befalls(self, what: str, strip: StripCopies) -> bool:
        is_first_layer = not strip.host_bytes
        return not is_first_layer and self.fault.exists() and self.fault.read_text() == f"{os.getpid()} {what}"


def main(arguments: list[str]) -> int:
    """Be a daemon, or one of its workers: ``worker FAULT FD``."""
    if arguments[1] == "worker":
        FaultyCopier.fault = Path(arguments[2])
        shard.HostCopier = FaultyCopier  # type: ignore[attr-defined]
        return worker_main.main([arguments[0], arguments[3]])
    fault = Path(arguments[arguments.index("--run-dir") + 1]) / FAULT
    process.WORKER_COMMAND = (sys.executable, "-m", __spec__.name, "worker", str(fault))  # type: ignore[misc,assignment]
    kvcached.__main__.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
