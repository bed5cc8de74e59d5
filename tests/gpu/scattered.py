"""Scattered pieces: how fast the driver's ways are, whether rows far apart and small batches bring the right bytes."""

from __future__ import annotations

import ctypes
import os
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any, Final

import numpy as np

from kvcached_client.cuda.driver import CudaFailure
from kvcached_client.cuda.rows import ROWS_MIN, split
from tests.gpu.rig import RUNS, Figures, Rig, best, one_piece, timed

_PIECES_BYTES: Final = (4 << 10, 16 << 10, 32 << 10, 72 << 10, 256 << 10, 1 << 20)


def crossover(rig: Rig) -> Figures:
    """Speeds of scattered pieces by batched copies, over that of one large copy; and of kernels that move them."""
    ratios: dict[str, float] = {}
    to_device: dict[str, float] = {}
    with rig.stream() as stream:
        whole = best(lambda: stream.copy(*one_piece(rig.address, rig.memory.address, rig.size_bytes)), stream)
        for piece_bytes in _PIECES_BYTES:
            device, host, sizes = rig.pieces(piece_bytes)
            share = len(sizes) * piece_bytes / rig.size_bytes
            for found, pieces in ((ratios, (host, device)), (to_device, (device, host))):
                found[str(piece_bytes)] = whole / best(partial(stream.copy, *pieces, sizes), stream) * share
    kernel = _moved_by_triton(rig.size_bytes, whole)
    return {
        "ok": True,
        "large_gb_per_s": rig.size_bytes / whole / 1e9,
        "batched_over_large": ratios,
        "batched_to_device_over_large": to_device,
        "gathered_by_torch_over_large": _gathered(rig.size_bytes, whole),
        "triton_over_large": kernel,
        "triton_wins_at_bytes": _wins(ratios, kernel),
    }


def small_batches(rig: Rig) -> Figures:
    """Batches of small pieces bring the right bytes.

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
            stream.copy(device, host, sizes)
            stream.synchronize()
            ctypes.memset(rig.address, 0, len(expected))
            stream.copy(*one_piece(rig.address, memory.address, 2 * len(expected)))
            stream.synchronize()
            found = np.frombuffer(rig.host[: 2 * len(expected)], np.uint8).reshape(2 * count, -1)
            bad = (found[places // np.uint64(piece_bytes)] != np.frombuffer(expected, np.uint8).reshape(count, -1)).any(
                1
            )
            wrong[f"{name} {count} x {piece_bytes}"] = int(bad.sum())
    return {"ok": not any(wrong.values()), "wrong_pieces": wrong}


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
        one = np.zeros(ROWS_MIN, np.int64)
        up, _ = split(numbers, memory.address, rig.address, pitch_max, one)
        down, _ = split(numbers[:, :, [1, 0, 2]], rig.address, memory.address, pitch_max, one)
        assert up is not None
        assert down is not None
        stream.copy_rows(up, to_host=False)
        stream.synchronize()
        ctypes.memset(rig.address, 0, size_bytes)
        seconds = best(partial(stream.copy_rows, down, to_host=True), stream)
        is_right = rig.host[:size_bytes] == expected
    return {"ok": is_right, "parts": int(up.destination_parts[0]), "gb_per_s": size_bytes / seconds / 1e9}


def rows_in_two_allocations(rig: Rig) -> Figures:
    """What the driver says to rows in two allocations that lie side by side: kvcached makes none. Judges not."""
    call, width, size_bytes = rig.device.driver.call, 16 << 10, 16 << 20
    with ExitStack() as parts:
        stream = parts.enter_context(rig.stream())
        first, second = sorted(int(call("cuMemAlloc", size_bytes)) for _ in range(2))
        for each in (first, second):
            parts.callback(call, "cuMemFree", each)
        numbers = np.array([[(first, 0, width), (second, width, width)]])
        rows, _ = split(numbers, 0, rig.address, rig.device.attribute("MAX_PITCH"), np.zeros(2, np.int64))
        if rows is None:
            return {"ok": True, "why": f"allocations are {second - first} bytes apart"}
        try:
            stream.copy_rows(rows, to_host=False)
            stream.synchronize()
        except CudaFailure as error:
            return {"ok": True, "distance_bytes": second - first, "refused": str(error)}
    return {"ok": True, "distance_bytes": second - first, "refused": ""}


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

        ratios[str(piece_bytes)] = whole_s / min(timed(gather) for _ in range(RUNS)) * rows.numel() / size_bytes
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
                name: whole_s / min(timed(run) for _ in range(RUNS)) * gather.size_bytes / size_bytes
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
