"""What only a device can tell: ``python -m tests.gpu.checks [--mib N]``. JSON on stdout; status 1 if a check failed.

The figures are those of this machine, the best of a few runs. `tests/gpu/run.sh` runs it with everything else.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvcached_client.cuda import driver
from kvcached_client.cuda.device import Device, DeviceMemory
from kvcached_client.cuda.driver import CudaFailure, Driver, Stream
from kvcached_client.cuda.rows import ROWS_MIN, split

_MIB: Final = 1 << 20
_RUNS: Final = 5
_ORDER_ROUNDS: Final = 200
_PIECES_BYTES: Final = (4 << 10, 16 << 10, 32 << 10, 72 << 10, 256 << 10, 1 << 20)
#: The batched copy as CUDA 13 declares it: without the number of the copy that is wrong.
_NEW_VERSION: Final = 13_000
_NEW_ARGUMENTS: Final = (
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p),
)
_PATIENCE_S: Final = 60

Figures = dict[str, Any]
Sizes = npt.NDArray[np.uint64]


class Rig:
    """A device with memory, and as much memory of this machine that it reaches.

    Args:
        size_bytes: of each.
        parts: takes what has to be closed.
    """

    def __init__(self, size_bytes: int, parts: ExitStack) -> None:
        self.driver = Driver()
        self.device = Device(self.driver)
        parts.callback(self.device.close)
        self.memory = parts.enter_context(self.device.make_memory(size_bytes))
        self.size_bytes = size_bytes
        self.host = mmap.mmap(-1, size_bytes)
        self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self.host))
        start = time.perf_counter()
        registered = self.device.register(self.address, size_bytes)
        self.registration_s = time.perf_counter() - start
        self.device_address = registered.device_address
        parts.callback(registered.close)

    @contextmanager
    def stream(self) -> Iterator[Stream]:
        """A stream of its own."""
        made = self.device.make_stream()
        try:
            yield made
        finally:
            made.synchronize()
            made.close()

    def pieces(self, piece_bytes: int) -> tuple[Sizes, Sizes, Sizes]:
        """All memory in pieces: where they are on the device, where in this process (in another order), and sizes."""
        count = self.size_bytes // piece_bytes
        starts = np.arange(count, dtype=np.uint64) * np.uint64(piece_bytes)
        scattered = np.random.default_rng(0).permutation(starts)
        sizes = np.full(count, piece_bytes, np.uint64)
        return starts + np.uint64(self.memory.address), scattered + np.uint64(self.address), sizes


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
            stream.copy(*_one(rig.memory.address, rig.address, rig.size_bytes))
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
            found[f"{name}_s"] = _best(partial(copy, host, device, sizes, stream.handle), stream)
        used = len(sizes) * int(sizes[0])
        back = np.frombuffer(rig.host, np.uint8)[:used]
        found[name] = bool((back == expected[:used]).all())
    return {"ok": all(found[name] for name in _copies(rig)), **found}


def registration(rig: Rig) -> Figures:
    """What registering memory of this machine costs."""
    return {"ok": True, "ms_per_gib": rig.registration_s * 1e3 * (1 << 30) / rig.size_bytes}


def crossover(rig: Rig) -> Figures:
    """Speeds of scattered pieces by batched copies, over that of one large copy; and of kernels that move them."""
    with rig.stream() as stream:
        whole = _best(lambda: stream.copy(*_one(rig.address, rig.memory.address, rig.size_bytes)), stream)
        ratios = {}
        for piece_bytes in _PIECES_BYTES:
            device, host, sizes = rig.pieces(piece_bytes)
            with _in_batches():
                seconds = _best(partial(stream.copy, host, device, sizes), stream)
            ratios[str(piece_bytes)] = whole / seconds * len(sizes) * piece_bytes / rig.size_bytes
    kernel = _moved_by_triton(rig.size_bytes, whole)
    return {
        "ok": True,
        "large_gb_per_s": rig.size_bytes / whole / 1e9,
        "batched_over_large": ratios,
        "gathered_by_torch_over_large": _gathered(rig.size_bytes, whole),
        "triton_over_large": kernel,
        "triton_wins_at_bytes": _wins(ratios, kernel),
    }


def both_directions(rig: Rig) -> Figures:
    """Half of the memory up and half of it down at once, over one after the other."""
    half = rig.size_bytes // 2
    up = _one(rig.memory.address, rig.address, half)
    down = _one(rig.address + half, rig.memory.address + half, half)
    with rig.stream() as one, rig.stream() as other:
        alone = _best(lambda: one.copy(*up), one) + _best(lambda: one.copy(*down), one)

        def at_once() -> None:
            one.copy(*up)
            other.copy(*down)

        together = _best(at_once, one, other)
    return {"ok": True, "speed_over_sum": alone / together / 2}


def small_batches(rig: Rig) -> Figures:
    """Batches of small pieces, which kvcached does not use: whether they bring the right bytes. Tells, and judges not.

    Into memory of this process, and into memory that came by a descriptor, as a worker's does.
    """
    rng = np.random.default_rng(3)
    wrong: dict[str, int] = {}
    with ExitStack() as parts:
        descriptor = rig.memory.export()
        parts.callback(os.close, descriptor)
        opened = parts.enter_context(rig.device.open_memory(descriptor, rig.size_bytes))
        stream = parts.enter_context(rig.stream())
        for (name, memory), piece_bytes, count in product(
            (("own", rig.memory), ("opened", opened)), (4 << 10, 8 << 10, 16 << 10, 24 << 10), (64, 384, 768, 4096)
        ):
            if 2 * count * piece_bytes > rig.size_bytes:
                continue
            places = rng.permutation(2 * count)[:count].astype(np.uint64) * np.uint64(piece_bytes)
            expected = rng.integers(0, 256, count * piece_bytes, dtype=np.uint8).tobytes()
            device, sizes = places + np.uint64(memory.address), np.full(count, piece_bytes, np.uint64)
            host = np.arange(count, dtype=np.uint64) * np.uint64(piece_bytes) + np.uint64(rig.address)
            rig.host[: len(expected)] = expected
            with _in_batches():
                stream.copy(device, host, sizes)
                stream.synchronize()
            ctypes.memset(rig.address, 0, len(expected))
            stream.copy(host, device, sizes)  # one by one
            stream.synchronize()
            found = np.frombuffer(rig.host[: len(expected)], np.uint8).reshape(count, -1)
            bad = (found != np.frombuffer(expected, np.uint8).reshape(count, -1)).any(1)
            wrong[f"{name} {count} x {piece_bytes}"] = int(bad.sum())
    return {"ok": True, "right": not any(wrong.values()), "wrong_pieces": wrong}


def rows_far_apart(rig: Rig) -> Figures:
    """Rows that are further apart than the greatest pitch come to the host and back as they are, and how fast."""
    pitch_max = rig.device.attribute("MAX_PITCH")
    distance = rig.device.whole_granules(pitch_max)
    if rig.device.free_bytes() < (ROWS_MIN + 1) * distance:
        return {"ok": True, "why": f"needs {(ROWS_MIN + 1) * distance} free bytes"}
    width, copies = 32 << 10, 64
    with ExitStack() as parts:
        memory = parts.enter_context(rig.device.make_memory(ROWS_MIN * distance))
        stream = parts.enter_context(rig.stream())
        size_bytes = copies * ROWS_MIN * width
        expected = np.random.default_rng(2).integers(0, 256, size_bytes, dtype=np.uint8).tobytes()
        rig.host[:size_bytes] = expected
        numbers = np.array(
            [
                [(row * distance + copy * width, (copy * ROWS_MIN + row) * width, width) for row in range(ROWS_MIN)]
                for copy in range(copies)
            ]
        )
        up, _ = split(numbers, memory.address, rig.address, pitch_max)
        down, _ = split(numbers[:, :, [1, 0, 2]], rig.address, memory.address, pitch_max)
        assert up is not None
        assert down is not None
        stream.copy_rows(up, to_host=False)
        stream.synchronize()
        ctypes.memset(rig.address, 0, size_bytes)
        seconds = _best(partial(stream.copy_rows, down, to_host=True), stream)
        is_right = rig.host[:size_bytes] == expected
    return {"ok": is_right, "parts": int(up.destination_parts[0]), "gb_per_s": size_bytes / seconds / 1e9}


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
    *(descriptor_keeps_memory, batched_copy, registration, crossover, both_directions, rows_far_apart),
    *(small_batches, write_value_order),
)


@contextmanager
def _in_batches() -> Iterator[None]:
    """Small pieces are copied in batches, too."""
    usual = driver.SMALL_PIECE_BYTES
    driver.SMALL_PIECE_BYTES = 0
    try:
        yield
    finally:
        driver.SMALL_PIECE_BYTES = usual


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


def _gathered(size_bytes: int, whole_s: float) -> Figures | str:
    """Pieces gathered by torch's kernel into one run, and that copied; over one large copy."""
    try:
        import torch  # noqa: PLC0415 - not everywhere
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "torch finds no device"
    pinned = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    ratios: Figures = {}
    for piece_bytes in _PIECES_BYTES:
        rows = torch.empty((size_bytes // piece_bytes, piece_bytes), dtype=torch.uint8, device="cuda")
        order = torch.randperm(len(rows), device="cuda")

        def gather(rows: Any = rows, order: Any = order) -> None:
            pinned[: rows.numel()].copy_(rows.index_select(0, order).view(-1), non_blocking=True)
            torch.cuda.synchronize()

        ratios[str(piece_bytes)] = whole_s / min(_timed(gather) for _ in range(_RUNS)) * rows.numel() / size_bytes
    return ratios


def _moved_by_triton(size_bytes: int, whole_s: float) -> Figures | str:
    """Pieces moved by a kernel that reaches pinned memory itself, both ways; over one large copy."""
    try:
        from tests.gpu.gather import Gather, directions  # noqa: PLC0415 - not everywhere
    except ImportError as error:
        return f"no Triton: {error}"
    ratios: Figures = {}
    try:
        for piece_bytes in _PIECES_BYTES:
            gather = Gather(size_bytes, piece_bytes)
            if not gather.is_right():
                return f"wrong bytes in pieces of {piece_bytes}"
            ratios[str(piece_bytes)] = {
                name: whole_s / min(_timed(run) for _ in range(_RUNS)) * gather.size_bytes / size_bytes
                for name, run in directions(gather).items()
            }
    except Exception as error:  # noqa: BLE001 - of torch, Triton, its compiler or the driver: a figure less
        return f"{type(error).__name__}: {error}"
    return ratios


def _wins(batched: Figures, kernel: Figures | str) -> list[int] | None:
    """The sizes of pieces that a kernel moves to the host faster than batched copies do; None without a kernel."""
    if isinstance(kernel, str):
        return None
    return [int(size) for size, ratios in kernel.items() if ratios["to_host"] > batched[size]]


def _best(queue: Callable[[], object], *streams: Stream) -> float:
    """Seconds until what is queued is done: the best of a few runs, after one that does not count."""

    def run() -> None:
        queue()
        for stream in streams:
            stream.synchronize()

    run()
    return min(_timed(run) for _ in range(_RUNS))


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _one(destination: int, source: int, size_bytes: int) -> tuple[Sizes, Sizes, Sizes]:
    destinations, sources, sizes = (np.array([each], np.uint64) for each in (destination, source, size_bytes))
    return destinations, sources, sizes


def _read(rig: Rig, memory: DeviceMemory, size_bytes: int) -> bytes:
    with rig.stream() as stream:
        stream.copy(*_one(rig.address, memory.address, size_bytes))
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
