"""An engine that closes what its device still works on: ``python -m tests.cuda.closing_engine RUN_DIR``.

Kernels are slow, and wait for nobody. What the daemon is told, and when, is noted.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable

from kvcached_client.transport.attach import AttachConnection
from tests.cuda.stream_engine import GATE_DEADLINE_MS, GatedEngine
from tests.line_process import say, serve

#: Longer than everything that is not waited for.
KERNEL_S = 0.5


class ClosingEngine(GatedEngine):
    """It has one slow kernel queued that writes into its pool."""

    def __init__(self, run_dir: str) -> None:
        super().__init__(run_dir)
        self._over = threading.Event()
        self.told: list[bool] = []

    def drop(self, _: int) -> str:
        """Close the pool and forget every view: whether the kernel was over when the daemon was told."""
        self._queue_slow_kernel()
        self._note_leaving(self.told.append)
        self.pool.close()
        self.parts = []
        gc.collect()
        return f"told {self.told} over {self._over.is_set()}"

    def forget(self, _: int) -> str:
        """Forget the pool and every view without closing: whether the kernel was over when that was done."""
        self._queue_slow_kernel()
        self.gates.close = lambda: None  # type: ignore[method-assign] # it would wait for the kernel
        del self.pool, self.gates
        self.parts = []
        gc.collect()
        return f"over {self._over.is_set()}"

    def close_gates(self, _: int) -> str:
        """Close gates for which a stream still has to wait, behind the kernel: whether that was over."""
        self._queue_slow_kernel()
        with self.gates.begin((), deadline_ms=GATE_DEADLINE_MS) as step:
            step.wait(self.streams[0].handle, 0)
        self.gates.close()
        return f"over {self._over.is_set()}"

    def exit(self, _: int) -> str:
        """Close the pool, keep a view, and leave it to the end of the process."""
        self._view = self.pool.cuda_keys_values(0)
        self._queue_slow_kernel()
        self._note_leaving(lambda over: say(f"told [{over}]"))
        self.pool.close()
        return "closed"

    def _queue_slow_kernel(self) -> None:
        part = self.parts[0]

        def run() -> None:
            time.sleep(KERNEL_S)
            part[0] = 1
            self._over.set()

        self.streams[0].launch(run)

    def _note_leaving(self, note: Callable[[bool], None]) -> None:
        over, leave = self._over, AttachConnection.leave

        def noted(connection: AttachConnection) -> None:
            note(over.is_set())
            leave(connection)

        setattr(AttachConnection, "leave", noted)  # noqa: B010 - nobody else may replace it


if __name__ == "__main__":
    serve(ClosingEngine(sys.argv[1]))
