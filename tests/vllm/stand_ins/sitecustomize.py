"""Lets vLLM's worker processes wait for each other without taking the cores from everybody else.

With this folder on PYTHONPATH, Python imports the module at its start. For a second after each step, and as long as any
request waits for a load or a store, vLLM's processes call `sched_yield` in a loop. On two cores some kernels then run
nobody else for ten seconds and more, the daemon and the threads that copy included: vLLM does that by itself, too.
"""

from __future__ import annotations

import os
import time

#: About what a turn of the loop takes where another process wants the core.
_PAUSE_S = 20e-6


def _pause() -> None:
    time.sleep(_PAUSE_S)


os.sched_yield = _pause
