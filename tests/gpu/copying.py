"""A copy process of an engine on a device: order, bytes, and the engine's death: ``python -m tests.gpu.copying``.

An engine fills blocks late, and orders their copies at once; the other process copies behind marks. Then an engine is
killed whose stream has not come to its mark: nothing of it may be stored. JSON on stdout; status 1 if something is not
as it should be. Memory is shared by a descriptor, and by CUDA IPC handles.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from kvcached_client import Admin
from kvcached_client.blocks.pages import EnginePages
from kvcached_client.copy_process.client import CopyProcess, EngineMemory, Outcome
from kvcached_client.cuda.device import Device
from kvcached_client.cuda.driver import Driver, Stream
from kvcached_client.errors import DeviceError
from kvcached_client.offload import new_instance
from tests.daemon.offload_process import BLOCKS, LAYERS, Order, Scheduler, job_of
from tests.daemon.supervised import supervised

_KINDS: Final = ("descriptor", "handles")
_PAGE_BYTES: Final = 64 << 10
_LAYER_BYTES: Final = BLOCKS * _PAGE_BYTES
_PROMPT_BLOCKS: Final = 12
_ROUNDS: Final = 6
#: What the engine's stream does before it writes blocks, so that a copy that does not wait comes too early.
_BUSY_BYTES: Final = 32 << 20
_JUNK: Final = 0xEE
_KILLED: Final = "killed"
_PATIENCE_S: Final = 60
_CONFIG: Final = f"""
session_ttl_ms = 20000
[host]
size_bytes = {64 << 20}
slab_bytes = {8 << 20}
verify = "always"
[offload]
"""

Report = dict[str, Any]


class Engine:
    """One shard of an engine; its kernels are fills by its stream."""

    def __init__(self, run_dir: Path, kind: str, fills: int, parts: ExitStack) -> None:
        self._fills = fills
        self.device = Device(Driver())
        parts.callback(self.device.close)
        self.busy = parts.enter_context(self.device.make_memory(_BUSY_BYTES))
        memory, self._layers = self._memory(kind, parts)
        self.stream: Stream = self.device.make_stream()
        parts.callback(self.stream.finish)
        tensors = {f"layer {number}": _tensor(address) for number, address in enumerate(self._layers)}
        self.scheduler = Scheduler(run_dir, new_instance(), 1, _PAGE_BYTES, _PATIENCE_S * 1000)
        parts.callback(self.scheduler.client.close)
        self.copies = CopyProcess.start(
            self.scheduler.client.session, 0, EnginePages.of_tensors(tensors), memory, deadline_ms=_PATIENCE_S * 1000
        )
        parts.callback(self.copies.close)
        parts.callback(self.scheduler.client.close)  # first

    def _memory(self, kind: str, parts: ExitStack) -> tuple[EngineMemory | None, list[int]]:
        driver = self.device.driver
        if kind == "handles":
            layers = [int(driver.call("cuMemAlloc", _LAYER_BYTES)) for _ in range(LAYERS)]
            for address in layers:
                parts.callback(driver.call, "cuMemFree", address)
            return None, layers
        made = parts.enter_context(self.device.make_memory(LAYERS * _LAYER_BYTES))
        descriptor = made.export()
        parts.callback(os.close, descriptor)
        layers = [made.address + number * _LAYER_BYTES for number in range(LAYERS)]
        return EngineMemory(descriptor, made.address, made.size_bytes), layers

    def store(self, name: str, value: int) -> int:
        """Order a store of blocks that the stream is to fill with values from this one on."""
        order = self.scheduler.prepare_store(name, _PROMPT_BLOCKS)[1]
        self._fill(order, lambda _: _JUNK)
        self._be_busy()
        self._fill(order, lambda depth: value + depth)
        return self.copies.store([job_of(order)], after=self.copies.mark(self.stream.handle))

    def load(self, name: str) -> Order:
        """Order a load over blocks that the stream is to fill with junk."""
        order = self.scheduler.prepare_load(name, _PROMPT_BLOCKS)
        self._be_busy()
        self._fill(order, lambda _: _JUNK)
        self.copies.load(job_of(order), after=self.copies.mark(self.stream.handle))
        return order

    def outcome(self) -> Outcome:
        """The end of the only order under way."""
        while not (found := self.copies.outcomes()):
            if not select.select([self.copies.fileno()], [], [], _PATIENCE_S)[0]:
                raise TimeoutError("a copy does not end")
        return found[0]

    def wrong_pages(self, order: Order, value: int) -> int:
        """Pages of a load that do not hold what was stored."""
        wrong, page = 0, (ctypes.c_ubyte * _PAGE_BYTES)()
        for depth, address in self._pages_of(order):
            self.device.driver.call("cuMemcpyDtoH", ctypes.addressof(page), address, _PAGE_BYTES)
            wrong += bytes(page) != bytes([value + depth]) * _PAGE_BYTES
        return wrong

    def wait_forever(self) -> None:
        """Let the stream wait for what never comes; this process can only be killed then."""
        self._never = mmap.mmap(-1, mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._never))
        self.stream.wait_value(self.device.register(address, mmap.PAGESIZE).device_address, 1)

    def _be_busy(self) -> None:
        for number in range(self._fills):
            self._set(self.busy.address, number % 256, _BUSY_BYTES)

    def _fill(self, order: Order, value: Callable[[int], int]) -> None:
        for depth, address in self._pages_of(order):
            self._set(address, value(depth), _PAGE_BYTES)

    def _set(self, address: int, value: int, size_bytes: int) -> None:
        driver = self.device.driver
        driver.call("cuMemsetD8Async", address, value, size_bytes, driver.names.CUstream(self.stream.handle))

    def _pages_of(self, order: Order) -> Iterator[tuple[int, int]]:
        for depth in range(order.start, order.start + len(order.slots)):
            for layer in self._layers:
                yield depth, layer + depth * _PAGE_BYTES


def _tensor(address: int) -> Any:
    """What `Scheduler` declares, in memory of the device."""
    return SimpleNamespace(
        shape=(BLOCKS, _PAGE_BYTES), dtype="torch.uint8", device=SimpleNamespace(type="cuda"),
        stride=lambda: (_PAGE_BYTES, 1), element_size=lambda: 1, data_ptr=lambda: address,
    )  # fmt: skip


def copies_behind_marks(run_dir: Path, kind: str, fills: int) -> Report:
    """Stores of blocks that are filled late, and loads over blocks that are in use until late."""
    wrong, times_ms = 0, []
    with ExitStack() as parts:
        engine = Engine(run_dir, kind, fills, parts)
        for number in range(_ROUNDS):
            name, value = f"{kind[0]} {number}", 16 * number
            engine.store(name, value)
            if error := engine.outcome().error:
                return {"ok": False, "why": error}
            order = engine.load(name)
            outcome = engine.outcome()
            wrong += len(outcome.bad) + bool(outcome.error) + engine.wrong_pages(order, value)
            times_ms.append(_idle_load_ms(engine, name))
    return {"ok": not wrong, "wrong_pages": wrong, "load_ms": float(np.median(times_ms))}


def _idle_load_ms(engine: Engine, name: str) -> float:
    """From the order of a load to its outcome, while the stream has nothing to do."""
    order = engine.scheduler.prepare_load(name, _PROMPT_BLOCKS)
    start = time.perf_counter()
    engine.copies.load(job_of(order), after=engine.copies.mark(engine.stream.handle))
    engine.outcome()
    return (time.perf_counter() - start) * 1e3


def engine_killed_before_its_mark(run_dir: Path, kind: str, _: int) -> Report:
    """SIGKILL of an engine before its stream has come to a store's mark: the copy process ends, nothing is stored."""
    command = [sys.executable, "-m", "tests.gpu.copying", "--engine", str(run_dir), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        copies = os.pidfd_open(int(engine.stdout.readline()))
        try:
            time.sleep(1)  # what does not wait for its mark is over then
            engine.send_signal(signal.SIGKILL)
            start = time.monotonic()
            has_ended = bool(select.select([copies], [], [], _PATIENCE_S)[0])
            ended_s = time.monotonic() - start
        finally:
            os.close(copies)
    with Admin.connect(run_dir, deadline_ms=_PATIENCE_S * 1000) as admin:
        while (states := admin.stats().hosts[0].states)["quarantined"] or states["filling"]:
            if time.monotonic() - start > _PATIENCE_S:
                return {"ok": False, "why": f"slots are not free: {dict(states)}"}
            time.sleep(0.05)
    scheduler = Scheduler(run_dir, new_instance(), 1, _PAGE_BYTES, _PATIENCE_S * 1000)
    with scheduler.client:
        found = scheduler.hit(_KILLED, _PROMPT_BLOCKS)
    return {"ok": has_ended and not found, "ended_s": ended_s, "blocks_found": found}


def be_killed(run_dir: Path, kind: str) -> None:
    """Order a store behind a mark that is never reached, say who copies, and wait."""
    with ExitStack() as parts:
        engine = Engine(run_dir, kind, 0, parts)
        engine.wait_forever()
        engine.store(_KILLED, 1)
        sys.stdout.write(f"{engine.copies.pid}\n")
        sys.stdout.flush()
        signal.pause()


def ipc_after_death() -> Report:
    """What an allocation holds for another process when the one that made it is killed. Tells, and judges not."""
    with ExitStack() as parts:
        device = Device(Driver())
        parts.callback(device.close)
        command = [sys.executable, "-m", "tests.gpu.copying", "--exporter"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as exporter:
            assert exporter.stdout is not None
            address = device.open_allocation(bytes.fromhex(exporter.stdout.readline()))
            before = device.free_bytes()
            exporter.send_signal(signal.SIGKILL)
        freed = device.free_bytes() - before
        page = (ctypes.c_ubyte * _PAGE_BYTES)()
        device.driver.call("cuMemcpyDtoH", ctypes.addressof(page), address, _PAGE_BYTES)
        return {"bytes_kept": bytes(page) == bytes([_JUNK]) * _PAGE_BYTES, "freed_bytes": freed, "bytes": _BUSY_BYTES}


def export_and_wait() -> None:
    """Share an allocation, and wait to be killed."""
    device = Device(Driver())
    address = int(device.driver.call("cuMemAlloc", _BUSY_BYTES))
    device.driver.call("cuMemsetD8", address, _JUNK, _BUSY_BYTES)
    device.driver.call("cuCtxSynchronize")
    sys.stdout.write(device.share(address).handle.hex() + "\n")
    sys.stdout.flush()
    signal.pause()


@contextmanager
def _daemon() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvcached-") as directory, supervised(Path(directory), _CONFIG) as daemon:
        yield daemon.run_dir


def _tried(check: Callable[[], Report]) -> Report:
    try:
        return check()
    except (DeviceError, TimeoutError) as error:
        return {"ok": False, "why": f"{type(error).__name__}: {error}"}


def main() -> int:
    """Run all of it on a daemon of its own."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.copying", description=__doc__)
    parser.add_argument("--fills", type=int, default=1000, help="fills of 32 MiB before a copy (default: %(default)s)")
    parser.add_argument("--engine", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--exporter", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        be_killed(Path(arguments.engine[0]), arguments.engine[1])
    if arguments.exporter:
        export_and_wait()
    report: Report = {}
    with _daemon() as run_dir:
        for kind, check in product(_KINDS, (copies_behind_marks, engine_killed_before_its_mark)):
            found = _tried(partial(check, run_dir, kind, arguments.fills))
            report.setdefault(kind, {})[check.__name__] = found
    ok = all(found["ok"] for kind in _KINDS for found in report[kind].values())
    report = {"ok": ok, **report, "ipc_after_death": _tried(ipc_after_death)}
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
