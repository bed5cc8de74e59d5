"""Suite ``cuda``: scattered blocks between a CUDA device and the host pool, as a worker moves them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from math import ceil
from statistics import median
from time import perf_counter
from typing import Final

import msgspec

from benchmarks.copy_rig import resident_memory
from benchmarks.cuda_loads import Loads
from benchmarks.cuda_rig import CudaRig, DeviceCopies
from benchmarks.result import Result, Target, judge
from benchmarks.timing import interleave
from kvcached_client.blocks.layout import KvGroup, Layout, PageOrder
from kvcached_client.cuda.device import Device
from kvcached_client.cuda.driver import CudaMissing, Driver

#: What each copy moves: as much as a prompt of some thousand tokens.
_COPY_BYTES: Final = 256 << 20
#: Likewise, of a prompt that hits a few blocks.
_SHORT_COPY_BYTES: Final = 4 << 20
_REGISTERED_BYTES: Final = 1 << 30
#: What a kernel of the engine without torch reads and writes.
_KERNEL_BYTES: Final = 64 << 20
#: How long the engine computes at a time: several loads.
_ENGINE_S: Final = 0.1
_MATMUL_SIZE: Final = 4096

_ROWS: Final = Target("value", ">=", 0.95)
_PIECES: Final = Target("value", ">=", 0.85)
_BOTH_WAYS: Final = Target("value", ">=", 0.8)
_LAYERWISE: Final = Target("value", "<=", 1.1)
_FIRST_LAYER_MS: Final = Target("value", "<=", 1)
_ENGINE: Final = Target("value", "<=", 1.03)


def _layout(order: PageOrder, *, layers: int, heads: int) -> Layout:
    group = KvGroup(layers=layers, kv_heads=heads, head_dim=128, v_head_dim=128, dtype="bfloat16")
    return Layout(block_size=16, shards=1, groups=(group,), order=order)


def _latent(layers: int) -> Layout:
    """A model with latent attention, blocks of 64 tokens."""
    group = KvGroup(layers=layers, kv_heads=1, head_dim=576, v_head_dim=0, dtype="bfloat16")
    return Layout(block_size=64, shards=1, groups=(group,), order="layer_first")


#: A block is one row.
_ROW_SHAPES: Final = {
    "rows_512k": _layout("block_first", layers=32, heads=2),
    "rows_1m": _layout("block_first", layers=32, heads=4),
    "rows_2560k": _layout("block_first", layers=80, heads=4),
}
#: A block is a piece for each layer.
_PIECE_SHAPES: Final = {"pieces_32k": _layout("layer_first", layers=32, heads=4), "pieces_72k": _latent(61)}
#: As where many devices share a model. These have no target.
_SMALL_SHAPES: Final = {
    "small_8k": _layout("layer_first", layers=32, heads=1),
    "small_16k": _layout("layer_first", layers=32, heads=2),
}

#: Those whose checksums are measured, too: they depend on the processors more than on the shape.
_SUMMED: Final = ("rows_1m", "pieces_32k", "small_8k")

Engine = Callable[[int], None]  #: runs so many kernels to their end
Targets = Target | tuple[()]  #: of a shape; () = none


def run(rounds: int) -> Iterator[Result]:
    """Measure the first device that this process sees, whatever driver that is.

    Raises:
        SystemExit: there is none; says what to do.
    """
    with ExitStack() as parts:
        try:
            device = Device(Driver())
        except CudaMissing as error:
            raise SystemExit(f"the suite cuda needs a CUDA device: {error}") from None
        parts.callback(device.close)
        version = device.driver.version
        name = f"{device.name}, CUDA {version // 1000}.{version % 1000 // 10}"
        print(f"suite cuda: on {name}", file=sys.stderr, flush=True)
        for result in _measure(device, rounds):
            yield msgspec.structs.replace(result, device=name)


def _measure(device: Device, rounds: int) -> Iterator[Result]:
    shapes_of: tuple[tuple[str, dict[str, Layout], Targets], ...] = (
        *(("rows", _ROW_SHAPES, _ROWS), ("pieces", _PIECE_SHAPES, _PIECES), ("small", _SMALL_SHAPES, ())),
    )
    for kind, shapes, target in shapes_of:
        details: list[Result] = []
        for shape, layout in shapes.items():
            with ExitStack() as parts:
                rig = CudaRig(device, layout, _COPY_BYTES, parts)
                rig.check()
                details += _scattered(rig, shape, target, rounds)
                details += _summed(rig, shape, rounds) if shape in _SUMMED else ()
                details += _layer_by_layer(rig, shape, target, rounds) if rig.layers > 1 else ()
        ratios = [each.value for each in details if each.metric.endswith("_over_one_copy_ratio")]
        yield judge("cuda", f"{kind}_over_one_copy_ratio", min(ratios), "ratio", target=target)
        yield from details
    yield from _short_load(device, rounds)
    yield from _registration(device, rounds)
    yield from _beside_engine(device, rounds)


def _scattered(rig: CudaRig, shape: str, target: Targets, rounds: int) -> Iterator[Result]:
    """Copies of each direction, and of both at once, against one large copy. Ratios are of speeds."""
    best = _best(
        {
            "store": rig.copy_to_host,
            "store_one_copy": rig.one_copy_to_host,
            "load": rig.copy_to_device,
            "load_one_copy": rig.one_copy_to_device,
            "bulk_load": rig.copy_to_device_in_bulk,
            "both": rig.copy_both_ways,
        },
        rounds,
    )
    for kind, one_copy in (("store", "store"), ("load", "load"), ("bulk_load", "load")):
        floor_s = best[f"{one_copy}_one_copy"]
        yield judge("cuda", f"{shape}_{kind}_over_one_copy_ratio", floor_s / best[kind], "ratio", target=target)
        speed, floor = (rig.size_bytes / seconds / 1e9 for seconds in (best[kind], floor_s))
        yield judge("cuda", f"{shape}_{kind}_gb_per_s", speed, "GB/s", floor=floor)
    together = 2 / best["both"] / (1 / best["store"] + 1 / best["load"])
    yield judge("cuda", f"{shape}_both_ways_over_sum_ratio", together, "ratio", target=target and _BOTH_WAYS)


def _summed(rig: CudaRig, shape: str, rounds: int) -> Iterator[Result]:
    """Transfers whose bytes the processors sum, as well: all stores, and loads of what crossed a restart."""
    best = _best(
        {
            "summed_store": rig.store,
            "store_one_copy": rig.one_copy_to_host,
            "verified_load": lambda: rig.load(verify=True),
            "load_one_copy": rig.one_copy_to_device,
        },
        rounds,
    )
    for kind, one_copy in (("summed_store", "store"), ("verified_load", "load")):
        speed, floor = (rig.size_bytes / best[name] / 1e9 for name in (kind, f"{one_copy}_one_copy"))
        yield judge("cuda", f"{shape}_{kind}_gb_per_s", speed, "GB/s", floor=floor)


def _layer_by_layer(rig: CudaRig, shape: str, target: Targets, rounds: int) -> Iterator[Result]:
    """What it costs to copy layer by layer, and how soon the first layer can be read."""
    first_layers: list[float] = []
    best = _best(
        {
            "layers": rig.copy_to_device,
            "bulk": rig.copy_to_device_in_bulk,
            "load": lambda: first_layers.append(rig.load()),
            "one_copy": rig.one_copy_to_device,
        },
        rounds,
    )
    cost, beyond_ms = best["layers"] / best["bulk"], (min(first_layers) - best["one_copy"] / rig.layers) * 1e3
    yield judge("cuda", f"{shape}_layerwise_over_bulk", cost, "ratio", target=target and _LAYERWISE)
    yield judge("cuda", f"{shape}_first_layer_beyond_its_bytes_ms", beyond_ms, "ms", target=target and _FIRST_LAYER_MS)


def _short_load(device: Device, rounds: int) -> Iterator[Result]:
    """What it costs to copy a few blocks layer by layer."""
    with ExitStack() as parts:
        rig = CudaRig(device, _PIECE_SHAPES["pieces_32k"], _SHORT_COPY_BYTES, parts)
        rig.check()
        best = _best({"layers": rig.copy_to_device, "bulk": rig.copy_to_device_in_bulk}, rounds)
    yield judge("cuda", "short_pieces_32k_layerwise_over_bulk", best["layers"] / best["bulk"], "ratio")
    yield judge("cuda", "short_pieces_32k_load_us", best["layers"] * 1e6, "us")


def _registration(device: Device, rounds: int) -> Iterator[Result]:
    """What it costs to let the device reach resident memory, and to end that."""
    memory = resident_memory(_REGISTERED_BYTES)
    begins: list[float] = []
    ends: list[float] = []
    try:
        for _ in range(rounds):
            start = perf_counter()
            registered = device.register(memory.address, _REGISTERED_BYTES)
            middle = perf_counter()
            registered.close()
            begins.append(middle - start)
            ends.append(perf_counter() - middle)
    finally:
        memory.close()
    for name, seconds in (("register", begins), ("unregister", ends)):
        ms = min(seconds) * 1e3 * (1 << 30) / _REGISTERED_BYTES
        yield judge("cuda", f"{name}_ms_per_gib", ms, "ms/GiB")


def _beside_engine(device: Device, rounds: int) -> Iterator[Result]:
    """How much longer an engine's kernels take while another process loads all the time: the median of rounds.

    The best of all rounds would hide what is asked for. What the engine takes alone is the mean of before and after: a
    device slows its clock down while it is busy.
    """
    with ExitStack() as parts:
        engines = _engines(device, parts)
        kernels = {name: _kernels(engine) for name, engine in engines.items()}
        loads = parts.enter_context(Loads(_COPY_BYTES))
        ratios: dict[str, list[float]] = {name: [] for name in engines}
        speeds: list[float] = []
        for _ in range(rounds):
            for name, engine in engines.items():
                alone = _timed(engine, kernels[name])
                loads.begin()
                beside = _timed(engine, kernels[name])
                speeds.append(loads.end())
                ratios[name].append(2 * beside / (alone + _timed(engine, kernels[name])))
    for name, measured in ratios.items():
        yield judge("cuda", f"engine_{name}_under_loads_ratio", median(measured), "ratio", target=_ENGINE)
    yield judge("cuda", "loads_beside_engine_gb_per_s", median(speeds) / 1e9, "GB/s")


def _engines(device: Device, parts: ExitStack) -> dict[str, Engine]:
    """What computes: copies within the device, and products of matrices where torch has the device."""
    engines: dict[str, Engine] = {"device_copies": DeviceCopies(device, _KERNEL_BYTES, parts).run}
    try:
        import torch  # noqa: PLC0415 - not everywhere
    except ImportError:
        return engines
    if not torch.cuda.is_available():
        return engines
    matrix = torch.randn((_MATMUL_SIZE, _MATMUL_SIZE), dtype=torch.bfloat16, device="cuda")
    product = torch.empty_like(matrix)

    def matmuls(kernels: int) -> None:
        for _ in range(kernels):
            torch.matmul(matrix, matrix, out=product)
        torch.cuda.synchronize()

    return {**engines, "matmuls": matmuls}


def _kernels(engine: Engine) -> int:
    """How many kernels the engine computes in its time; the first ones do not count."""
    some = 10
    engine(some)
    return max(1, ceil(_ENGINE_S / _timed(engine, some) * some))


def _timed(engine: Engine, kernels: int) -> float:
    start = perf_counter()
    engine(kernels)
    return perf_counter() - start


def _best(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    return {name: min(seconds) for name, seconds in interleave(cases, rounds).items()}
