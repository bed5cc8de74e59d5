"""Continuous loads by a process of its own, as a worker is one: ``python -m benchmarks.cuda_loads BYTES``.

A line on stdin begins the loads, the next one ends them; the answers are a line each, the second with bytes a second.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Final, Self

from benchmarks.cuda_rig import CudaRig
from kvcached_client.blocks.layout import KvGroup, Layout
from kvcached_client.cuda.device import Device
from kvcached_client.cuda.driver import Driver

_ROOT: Final = Path(__file__).resolve().parents[1]
_LAYOUT: Final = Layout(
    block_size=16,
    shards=1,
    groups=(KvGroup(layers=32, kv_heads=4, head_dim=128, v_head_dim=128, dtype="bfloat16"),),
    order="layer_first",
)


class Loads:
    """The process, as the suite sees it. It ends with the block of `with`.

    Args:
        size_bytes: of one load.

    Raises:
        RuntimeError: it has ended; its stderr says why.
    """

    def __init__(self, size_bytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.cuda_loads", str(size_bytes)],
            cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            self._hear()
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    def begin(self) -> None:
        """Load from now on; returns when the first load is under way."""
        self._ask()

    def end(self) -> float:
        """Load no more; returns bytes a second since `begin`."""
        return float(self._ask())

    def _ask(self) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError("the process that loads has ended")
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def _load_until(ending: threading.Event, rig: CudaRig) -> float:
    loaded, start = 0, perf_counter()
    while not loaded or not ending.is_set():
        rig.load()
        loaded += rig.size_bytes
    return loaded / (perf_counter() - start)


def main(size_bytes: int) -> None:
    """Serve stdin to its end."""
    with ExitStack() as parts:
        device = Device(Driver())
        parts.callback(device.close)
        rig = CudaRig(device, _LAYOUT, size_bytes, parts)
        rig.check()
        thread = parts.enter_context(ThreadPoolExecutor(1, "loads", initializer=device.use))
        print("ready", flush=True)
        while sys.stdin.readline():
            ending = threading.Event()
            loading = thread.submit(_load_until, ending, rig)
            print("loading", flush=True)
            sys.stdin.readline()
            ending.set()
            print(loading.result(), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
