"""What only a device can tell: ``python -m tests.gpu.checks [--mib N]``. JSON on stdout; status 1 if a check failed.

The figures are those of this machine, the best of a few runs. `tests/gpu/run.sh` runs it with everything else.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Final

import numpy as np

from kvcached_client.cuda.device import DeviceMemory
from kvcached_client.cuda.driver import CudaFailure
from tests.gpu.rig import Figures, Rig, Sizes, best, one_piece
from tests.gpu.scattered import crossover, rows_far_apart, rows_in_two_allocations, small_batches

_MIB: Final = 1 << 20
_ORDER_ROUNDS: Final = 200
#: The batched copy as CUDA 13 declares it: without the number of the copy that is wrong.
_NEW_VERSION: Final = 13_000
_NEW_ARGUMENTS: Final = (
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p),
)
_PATIENCE_S: Final = 60


def descriptor_keeps_memory(rig: Rig) -> Figures:
    """Memory that a process made and exported has its bytes after that process was killed, and is free afterwards."""
    ours, theirs = socket.socketpair()
    with ours:
        maker = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.checks", "--maker", str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        ours.settimeout(_PATIENCE_S)
        data, (descriptor, *_), _, _ = socket.recv_fds(ours, 64, 1)
        maker.send_signal(signal.SIGKILL)
        maker.wait()
    size_bytes = int(data)
    kept = rig.device.free_bytes()
    with rig.device.open_memory(descriptor, size_bytes) as opened:
        os.close(descriptor)
        found = _read(rig, opened, size_bytes)
    freed = rig.device.free_bytes() - kept
    is_whole = bool((np.frombuffer(found, np.uint8) == _fill_byte(size_bytes)).all())
    return {"ok": is_whole and freed >= size_bytes, "bytes_kept": is_whole, "freed_bytes": freed, "bytes": size_bytes}


def make_and_wait(descriptor: int) -> None:
    """Make memory, fill it, send its descriptor, and wait to be killed."""
    with socket.socket(fileno=descriptor) as connection, ExitStack() as parts:
        rig = Rig(4 * _MIB, parts)
        ctypes.memset(rig.address, _fill_byte(rig.size_bytes), rig.size_bytes)
        with rig.stream() as stream:
            stream.copy(*one_piece(rig.memory.address, rig.address, rig.size_bytes))
        socket.send_fds(connection, [str(rig.size_bytes).encode()], [rig.memory.export()])
        connection.recv(1)


def batched_copy(rig: Rig) -> Figures:
    """Both declarations of the batched copy, and a call for each piece, move the same bytes."""
    device, host, sizes = rig.pieces(72 << 10)
    expected = np.random.default_rng(1).integers(0, 256, rig.size_bytes, dtype=np.uint8)
    found: Figures = {"pieces": len(sizes), "batches": rig.driver.batches}
    for name, copy in _copies(rig).items():
        rig.host[:] = expected.tobytes()
        with rig.stream() as stream:
            copy(device, host, sizes, stream.handle)
            stream.synchronize()
            ctypes.memset(rig.address, 0, rig.size_bytes)
            found[f"{name}_s"] = best(partial(copy, host, device, sizes, stream.handle), stream)
        used = len(sizes) * int(sizes[0])
        back = np.frombuffer(rig.host, np.uint8)[:used]
        found[name] = bool((back == expected[:used]).all())
    return {"ok": all(found[name] for name in _copies(rig)), **found}


def registration(rig: Rig) -> Figures:
    """What registering memory of this machine costs."""
    return {"ok": True, "ms_per_gib": rig.registration_s * 1e3 * (1 << 30) / rig.size_bytes}


def both_directions(rig: Rig) -> Figures:
    """Half of the memory up and half of it down at once, over one after the other."""
    half = rig.size_bytes // 2
    up = one_piece(rig.memory.address, rig.address, half)
    down = one_piece(rig.address + half, rig.memory.address + half, half)
    with rig.stream() as one, rig.stream() as other:
        alone = best(lambda: one.copy(*up), one) + best(lambda: one.copy(*down), one)

        def at_once() -> None:
            one.copy(*up)
            other.copy(*down)

        together = best(at_once, one, other)
    return {"ok": True, "speed_over_sum": alone / together / 2}


def write_value_order(rig: Rig) -> Figures:
    """Who sees a value that a stream wrote behind a batched copy sees all bytes of the copy."""
    device, host, sizes = rig.pieces(32 << 10)
    count = min(len(sizes) - 1, 256)
    place = ctypes.c_uint32.from_address(rig.address + rig.size_bytes - 4)
    host = np.arange(count, dtype=np.uint64) * np.uint64(32 << 10) + np.uint64(rig.address)
    late = 0
    with rig.stream() as stream:
        for number in range(1, _ORDER_ROUNDS + 1):
            place.value = 0
            ctypes.memset(rig.address, number % 251, count * (32 << 10))
            stream.copy(device[:count], host, sizes[:count])
            stream.synchronize()
            ctypes.memset(rig.address, 0xFF, count * (32 << 10))
            stream.copy(host, device[:count], sizes[:count])
            stream.write(rig.device_address + rig.size_bytes - 4, number)
            end = time.monotonic() + _PATIENCE_S
            while place.value != number:  # what an engine must not do; here it is what is asked
                if time.monotonic() > end:
                    return {"ok": False, "why": f"the value of round {number} never came"}
            seen = np.frombuffer(rig.host, np.uint8)[: count * (32 << 10)]
            late += bool((seen != number % 251).any())
    return {"ok": not late, "rounds": _ORDER_ROUNDS, "rounds_with_late_bytes": late}


CHECKS: Final[tuple[Callable[[Rig], Figures], ...]] = (
    *(
        descriptor_keeps_memory,
        batched_copy,
        registration,
        crossover,
        both_directions,
        rows_far_apart,
        rows_in_two_allocations,
    ),
    *(small_batches, write_value_order),
)


def _copies(rig: Rig) -> dict[str, Callable[..., object]]:
    driver = rig.driver

    def one_by_one(destinations: Sizes, sources: Sizes, sizes: Sizes, stream: int) -> None:
        for piece in zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            driver.call("cuMemcpyAsync", *piece, driver.names.CUstream(stream))

    copies: dict[str, Callable[..., object]] = {"one_by_one": one_by_one}
    if driver.batches:
        copies["as_of_12080"] = driver.copy
    try:
        new = driver._function("cuMemcpyBatchAsync", _NEW_VERSION, _NEW_ARGUMENTS)
    except CudaFailure:
        return copies

    def as_of_13000(destinations: Sizes, sources: Sizes, sizes: Sizes, stream: int) -> None:
        attributes, first = (ctypes.c_uint * 6)(1), ctypes.c_size_t(0)
        arrays = (each.ctypes.data for each in (destinations, sources, sizes))
        if result := new(*arrays, len(sizes), ctypes.byref(attributes), ctypes.byref(first), 1, stream):
            raise CudaFailure("cuMemcpyBatchAsync", str(result))

    copies["as_of_13000"] = as_of_13000
    return copies


def _read(rig: Rig, memory: DeviceMemory, size_bytes: int) -> bytes:
    with rig.stream() as stream:
        stream.copy(*one_piece(rig.address, memory.address, size_bytes))
        stream.synchronize()
    return rig.host[:size_bytes]


def _fill_byte(size_bytes: int) -> int:
    return size_bytes // _MIB + 0x51


def main() -> int:
    """Run all checks."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.checks", description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="memory to copy, on each side (default: %(default)s)")
    parser.add_argument("--maker", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.maker is not None:
        make_and_wait(arguments.maker)
        return 0
    with ExitStack() as parts:
        rig = Rig(arguments.mib * _MIB, parts)
        report: Figures = {"device": rig.device.name, "driver": rig.driver.version, "mib": arguments.mib}
        for check in CHECKS:
            sys.stderr.write(f"{check.__name__} …\n")
            try:
                report[check.__name__] = check(rig)
            except CudaFailure as error:
                report[check.__name__] = {"ok": False, "why": str(error)}
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return 0 if all(report[check.__name__]["ok"] for check in CHECKS) else 1


if __name__ == "__main__":
    sys.exit(main())
