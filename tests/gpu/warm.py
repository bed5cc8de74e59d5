"""Memory of the daemon that outlives its engine on a device: ``python -m tests.gpu.warm``.

An engine is killed while its stream has work for seconds in the daemon's memory. The next one gets the memory once the
first one is dead, and nothing may change there any more; what the first one had finished is there. Before that, memory
is mapped in place of scratch memory under a graph that was captured. JSON on stdout; status 1 if something is not as it
should be.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from kvcached_client.blocks.memory_locks import lock_memory
from kvcached_client.cuda.device import Device, uuid_of
from kvcached_client.cuda.driver import Driver
from kvcached_client.cuda.engine_pool import EnginePoolMemory
from kvcached_client.errors import KvcachedError
from kvcached_client.protocol.attach import ClaimPool
from kvcached_client.transport.attach import PoolDescriptors, claim_pool
from kvcached_client.vllm.device_memory import RankMemory
from kvcached_client.vllm.settings import Settings
from tests.daemon.supervised import supervised

_RANK_BYTES: Final = 64 << 20
#: The first half is written once; the second half is what the stream fills when the engine is killed.
_HALF_BYTES: Final = _RANK_BYTES // 2
_DONE: Final = 0x3C
_PATIENCE_S: Final = 90
#: Between two looks at memory in which nothing may change.
_PAUSE_S: Final = 1.0
_CONFIG: Final = f"""
[host]
size_bytes = {16 << 20}
slab_bytes = {8 << 20}
[offload]
device_memory_bytes = {4 * _RANK_BYTES}
"""

Report = dict[str, Any]


def memory_under_a_graph() -> Report:
    """A graph that was captured while scratch memory was there writes the memory that is there now."""
    with ExitStack() as parts:
        device = Device(Driver())
        parts.callback(device.close)
        descriptor = parts.enter_context(device.make_memory(_RANK_BYTES)).export()
        parts.callback(os.close, descriptor)
        memory = EnginePoolMemory(descriptor, _RANK_BYTES, device.uuid)
        device.use()
        driver, stream = device.driver, device.make_stream()
        parts.callback(stream.finish)
        handle = driver.names.CUstream(stream.handle)
        mode = driver.names.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        driver.call("cuStreamBeginCapture", handle, mode)
        driver.call("cuMemsetD8Async", memory.address + _HALF_BYTES, _DONE, _HALF_BYTES, handle)
        graph = driver.call("cuStreamEndCapture", handle)
        executable = driver.call("cuGraphInstantiate", graph, 0)
        parts.callback(driver.call, "cuGraphExecDestroy", executable)
        driver.call("cuGraphDestroy", graph)
        driver.call("cuGraphLaunch", executable, handle)
        stream.synchronize()
        memory.open(is_new=True)
        before = _bytes(device, memory.address, _RANK_BYTES)
        driver.call("cuGraphLaunch", executable, handle)
        stream.synchronize()
        after = _bytes(device, memory.address, _RANK_BYTES)
        expected = bytes(_HALF_BYTES) + bytes([_DONE]) * _HALF_BYTES
        return {"ok": before == bytes(_RANK_BYTES) and after == expected}


def memory_of_a_killed_engine(run_dir: Path, fills: int) -> Report:
    """The next engine gets the memory, with what was finished, and nothing changes in it any more."""
    command = [sys.executable, "-m", "tests.gpu.warm", "--engine", str(run_dir), "--fills", str(fills)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "busy\n"
        table = claim_pool(run_dir, _question("first", None), deadline_ms=_PATIENCE_S * 1000).table
        dead = os.pidfd_open(engine.pid)
        freed_s: list[float] = []
        waiting = threading.Thread(target=lambda: freed_s.append(_freed_s(table)))
        waiting.start()
        engine.send_signal(signal.SIGKILL)
        killed_s = time.monotonic()
        select.select([dead], [], [], _PATIENCE_S)
        dead_s = time.monotonic()
        waiting.join()
        os.close(dead)
        os.close(table)
    found = _claimed(run_dir, "second")
    with ExitStack() as parts:
        device = Device(Driver())
        parts.callback(device.close)
        memory = EnginePoolMemory(found.memory or 0, _RANK_BYTES, device.uuid)
        memory.open(is_new=False)
        device.use()
        first = _bytes(device, memory.address, _RANK_BYTES)
        time.sleep(_PAUSE_S)
        is_still = first == _bytes(device, memory.address, _RANK_BYTES)
    is_kept = first[:_HALF_BYTES] == bytes([_DONE]) * _HALF_BYTES
    return {
        "ok": is_still and is_kept,
        "still": is_still,
        "kept": is_kept,
        "dead_s": dead_s - killed_s,
        "lock_before_death_s": dead_s - freed_s[0],
    }


def torch_on_the_memory(run_dir: Path) -> Report:
    """What vLLM's connector does: torch's KV cache is the daemon's memory, also under a graph that torch captured."""
    try:
        import torch  # noqa: PLC0415 - not everywhere

        from kvcached_client.tensors import OtherMemory  # noqa: PLC0415 - imports torch
    except ImportError:
        return {"ok": True, "ran": False}
    if not torch.cuda.is_available():
        return {"ok": True, "ran": False}
    ordinal = torch.cuda.current_device()
    question = ClaimPool(
        name="torch", claim="torch", ranks=1, rank=0, rank_bytes=_RANK_BYTES, blocks=64, device=uuid_of(ordinal)
    )
    memory = RankMemory(question, Settings(run_dir=str(run_dir)))
    with OtherMemory(memory.allocate, "cuda"):
        cache = torch.zeros(_RANK_BYTES, dtype=torch.int8, device="cuda")
    halves = cache.view(torch.float16).view(2, -1)
    rows = torch.tensor([1], device="cuda")
    values = torch.full((1, halves.shape[1]), 7.0, dtype=torch.float16, device="cuda")

    def step() -> None:
        halves.index_copy_(0, rows, values)

    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(aside):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    is_claimed = bool(memory.pool_id([cache.data_ptr()]))
    before = bool((cache == 0).all())
    graph.replay()
    torch.cuda.synchronize()
    after = bool((halves[1] == 7).all()) and bool((halves[0] == 0).all())
    return {"ok": is_claimed and before and after, "ran": True, "claimed": is_claimed, "zero": before, "written": after}


def be_killed(run_dir: Path, fills: int) -> None:
    """Finish one half, queue work for the other half, say so, and wait."""
    found = _claimed(run_dir, "first")
    lock_memory(found.table, 0, 0)
    device = Device(Driver())
    memory = EnginePoolMemory(found.memory or 0, _RANK_BYTES, device.uuid)
    memory.open(is_new=True)
    device.use()
    driver, stream = device.driver, device.make_stream()
    handle = driver.names.CUstream(stream.handle)
    driver.call("cuMemsetD8Async", memory.address, _DONE, _HALF_BYTES, handle)
    stream.synchronize()
    for number in range(fills):
        driver.call("cuMemsetD8Async", memory.address + _HALF_BYTES, number % 256, _HALF_BYTES, handle)
    sys.stdout.write("busy\n")
    sys.stdout.flush()
    signal.pause()


def _question(claim: str, rank: int | None) -> ClaimPool:
    device = "" if rank is None else uuid_of(0)
    return ClaimPool(name="warm", claim=claim, ranks=1, rank=rank, rank_bytes=_RANK_BYTES, blocks=64, device=device)


def _claimed(run_dir: Path, claim: str) -> PoolDescriptors:
    return claim_pool(run_dir, _question(claim, 0), deadline_ms=_PATIENCE_S * 1000)


def _freed_s(table: int) -> float:
    """When the kernel gives the lock of the rank away; it is given back at once."""
    lock = lock_memory(table, _PATIENCE_S, 0)
    freed_s = time.monotonic()
    if lock is not None:
        os.close(lock)
    return freed_s


def _bytes(device: Device, address: int, size_bytes: int) -> bytes:
    host = (ctypes.c_ubyte * size_bytes)()
    device.driver.call("cuMemcpyDtoH", ctypes.addressof(host), address, size_bytes)
    return bytes(host)


def _tried(check: Callable[[], Report]) -> Report:
    try:
        return check()
    except KvcachedError as error:
        return {"ok": False, "why": f"{type(error).__name__}: {error}"}


def main() -> int:
    """Run all of it on a daemon of its own."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.warm", description=__doc__)
    parser.add_argument("--fills", type=int, default=20_000, help="fills of 32 MiB at the kill (default: %(default)s)")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        be_killed(Path(arguments.engine), arguments.fills)
    report = {"memory_under_a_graph": _tried(memory_under_a_graph)}
    with tempfile.TemporaryDirectory(prefix="kvcached-") as directory, supervised(Path(directory), _CONFIG) as daemon:
        killed = _tried(lambda: memory_of_a_killed_engine(daemon.run_dir, arguments.fills))
        report["memory_of_a_killed_engine"] = killed
        report["torch_on_the_memory"] = _tried(lambda: torch_on_the_memory(daemon.run_dir))
    ok = all(each["ok"] for each in report.values())
    sys.stdout.write(json.dumps({"ok": ok, **report}, indent=1) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
