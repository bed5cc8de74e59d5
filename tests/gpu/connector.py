"""What vLLM's connector does with torch's tensors on a device: ``python -m tests.gpu.connector``.

The connector's class needs vLLM. What it does in a worker does not: tensors in vLLM's shapes, made one by one, orders
after each step, copies by a process of its own, or by a thread, and, in memory of the daemon, by a process. Blocks are
computed late, by torch's kernels, and stored; other tensors, which late kernels still write, are loaded over. Then a
step of many small kernels, as a decode step is, is timed alone, and with a load or a store ordered in each step. JSON
on stdout; status 1 if a block is not as it should be. Where torch has no CUDA device, tensors are on the CPU, which
shows that the script runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import torch

from kvcached_client.blocks.jobs import BlockJob, JobSpan
from kvcached_client.blocks.pages import EnginePages
from kvcached_client.copy_process.shards import Shards
from kvcached_client.cuda.device import uuid_of
from kvcached_client.offload import OffloadClient, OffloadLayout, new_instance
from kvcached_client.offload_shard import OffloadShard
from kvcached_client.protocol.attach import ClaimPool
from kvcached_client.tensors import OtherMemory
from kvcached_client.types import TransferId
from kvcached_client.vllm.device_memory import RankMemory
from kvcached_client.vllm.orders import LoadOrder, SessionNote, StepOrders, StoreOrder
from kvcached_client.vllm.settings import SWITCH_INTERVAL_S, Settings
from kvcached_client.vllm.worker import WorkerSide
from tests.daemon.offload_process import keys_of
from tests.daemon.supervised import supervised

_TOKENS: Final = 16
_HEADS, _HEAD_DIM = 4, 128
_PATIENCE_S: Final = 60
_LATE_CYCLES: Final = 20_000_000  #: of the device's clock: some 10 ms
_ROUNDS: Final = 4
_BLOCKS: Final = 64
_PROMPT_BLOCKS: Final = 24
#: What a step launches, as a decode step does without CUDA graphs.
_KERNELS: Final = 400
_STEPS: Final = 30
_STEP_BLOCKS: Final = 16
_CONFIG: Final = f"""
session_ttl_ms = 60000
[host]
size_bytes = {2 << 30}
slab_bytes = {64 << 20}
[offload]
device_memory_bytes = {2 << 30}
"""

Report = dict[str, Any]
Orders = tuple[tuple[LoadOrder, ...], tuple[StoreOrder, ...]]


class Shape(NamedTuple):
    """Of a layer's tensor.

    Attributes:
        of: how many blocks.
        axis: the one that counts blocks.
    """

    of: Callable[[int], tuple[int, ...]]
    axis: int


#: K and V apart, K and V of a block side by side, latent attention.
_SHAPES: Final = {
    "2BNHC": Shape(lambda blocks: (2, blocks, _TOKENS, _HEADS, _HEAD_DIM), 1),
    "B2NHC": Shape(lambda blocks: (blocks, 2, _TOKENS, _HEADS, _HEAD_DIM), 0),
    "BNC": Shape(lambda blocks: (blocks, _TOKENS, 576), 0),
}


class Worker:
    """vLLM's scheduler and worker in one: a step at a time, with the connector's side of the worker."""

    def __init__(
        self, run_dir: Path, device: str, copies: str, shape: str, layers: int, blocks: int, parts: ExitStack
    ) -> None:
        self.device, self.blocks, self._shape = device, blocks, _SHAPES[shape]
        size = self._shape.of(blocks)
        memory: RankMemory | None = None
        if copies == "daemon":
            memory, self.layers = _in_daemon_memory(run_dir, size, layers, blocks)
        else:
            self.layers = [torch.zeros(size, dtype=torch.bfloat16, device=device) for _ in range(layers)]
        pages = EnginePages.of_tensors({f"layers.{number}": each for number, each in enumerate(self.layers)})
        addresses = [layer.address for layer in pages.layers]
        if memory is not None and not memory.pool_id(addresses):
            raise RuntimeError("the tensors are not in memory of the daemon")
        self.block_bytes = pages.block_bytes
        self._client = OffloadClient.connect(
            str(run_dir),
            engine="vllm",
            instance=new_instance(),
            keyspace=f"{shape} {layers}".ljust(32).encode(),
            label=shape,
            layout=OffloadLayout(_TOKENS, 1, pages.block_bytes, pages.fingerprint),
            deadline_ms=_PATIENCE_S * 1000,
        )
        parts.callback(self._client.close)
        shards = Shards(
            pages,
            0,
            lambda ordinal: torch.cuda.current_stream(ordinal).cuda_stream,
            deadline_ms=_PATIENCE_S * 1000,
            in_process=copies != "thread",
            log=logging.getLogger("connector"),
            memory=None if memory is None else memory.of_copies(addresses),
        )
        self.side = WorkerSide(shards)
        parts.callback(self.side.close)
        self._numbers = count()
        self._busy = torch.ones(64, device=device)

    # --- what vLLM does ---------------------------------------------------------------------------------------------

    def compute(self, name: str, blocks: Sequence[int]) -> None:
        """Launch the kernels that write blocks, behind others that take long."""
        if self.device != "cpu":
            torch.cuda._sleep(_LATE_CYCLES)  # type: ignore[no-untyped-call]
        at = torch.tensor(blocks, device=self.device)
        for number, layer in enumerate(self.layers):
            layer.index_copy_(self._shape.axis, at, self._content(name, number, len(blocks)))

    def step(self, orders: Orders) -> None:
        """Launch a step's kernels, accept its orders, and wait for what it samples."""
        for _ in range(_KERNELS):
            self._busy.mul_(1.0)
        self.side.begin(StepOrders(SessionNote(1, self._client.session.to_bytes()), *orders))
        self._busy.sum().item()

    def wait(self, loads: int = 0, stores: int = 0) -> int:
        """Until so many copies have ended; how many blocks could not be loaded, or stores have failed."""
        end, failed = time.monotonic() + _PATIENCE_S, 0
        while loads > 0 or stores > 0:
            loads -= len(self.side.take_loaded())
            failed += len(self.side.take_bad_blocks())
            report = self.side.take_stored()
            if report is not None:
                stores -= len(report.done)
                failed += len(report.failed)
            if time.monotonic() > end:
                raise TimeoutError("copies do not end")
            self._busy.sum().item()
        return failed

    # --- orders -----------------------------------------------------------------------------------------------------

    def store(self, name: str, blocks: Sequence[int]) -> StoreOrder:
        """The order to store a prompt, of which nothing is cached."""
        keys = keys_of(name, len(blocks))
        lease, hit, _, _ = self._client.acquire(self._request(), keys, len(blocks) * _TOKENS, full=True)
        plan = self._client.prepare_store(lease, hit, keys)
        self._client.release(lease)
        assert not hit
        assert plan.pieces[0].blocks == len(blocks)
        return StoreOrder(1, self._job(plan, keys, blocks))

    def load(self, name: str, blocks: Sequence[int]) -> LoadOrder:
        """The order to load a whole prompt."""
        keys = keys_of(name, len(blocks))
        lease, hit, _, _ = self._client.acquire(self._request(), keys, len(blocks) * _TOKENS, full=True)
        assert hit == len(blocks)
        plan = self._client.prepare_load(lease, 0, hit)
        self._client.release(lease)
        return LoadOrder(1, self._request(), self._job(plan, keys, blocks))

    def wrong_blocks(self, name: str, blocks: Sequence[int]) -> int:
        """Blocks that are not what was computed for a prompt."""
        at = torch.tensor(blocks, device=self.device)
        wrong = torch.zeros(len(blocks), dtype=torch.bool, device=self.device)
        for number, layer in enumerate(self.layers):
            found = layer.index_select(self._shape.axis, at)
            differs = found.view(torch.int16) != self._content(name, number, len(blocks)).view(torch.int16)
            wrong |= differs.movedim(self._shape.axis, 0).flatten(1).any(1)
        return int(wrong.sum())

    def _content(self, name: str, layer: int, blocks: int) -> torch.Tensor:
        """What a layer of a prompt's blocks holds."""
        seed = int.from_bytes(keys_of(name, 1)[:6]) + layer
        generator = torch.Generator(self.device).manual_seed(seed)
        values = torch.randint(-(1 << 15), 1 << 15, self._shape.of(blocks), generator=generator, device=self.device)
        return values.to(torch.int16).view(torch.bfloat16)

    def _request(self) -> str:
        return f"request {next(self._numbers)}"

    def _job(self, plan: Any, keys: bytes, blocks: Sequence[int]) -> BlockJob:
        span = JobSpan(0, b"", keys, torch.tensor(blocks).numpy(), plan.slots)
        return BlockJob(TransferId(plan.transfer), plan.generation, (span,))


def _in_daemon_memory(
    run_dir: Path, size: tuple[int, ...], layers: int, blocks: int
) -> tuple[RankMemory, list[torch.Tensor]]:
    """Layers in memory of the daemon, as with `device_memory`; vLLM has not warmed up yet."""
    ordinal = torch.cuda.current_device()
    layer_bytes = math.prod(size) * torch.bfloat16.itemsize
    question = ClaimPool(
        name="connector", claim=new_instance().hex(), ranks=1, rank=0, rank_bytes=layers * layer_bytes, blocks=blocks,
        device=uuid_of(ordinal),
    )  # fmt: skip
    memory = RankMemory(question, Settings(run_dir=str(run_dir)))
    with OtherMemory(memory.allocate, "cuda"):
        cache = torch.zeros(layers * layer_bytes, dtype=torch.int8, device="cuda")
    return memory, [each.view(torch.bfloat16).view(size) for each in cache.view(layers, layer_bytes)]


def blocks_of_late_kernels(run_dir: Path, device: str, copies: str, shape: str) -> Report:
    """What one worker stores another one loads, over blocks that are written until late."""
    wrong = bad = 0
    first_store_ms: float | None = None
    free_bytes = _free_bytes(device)
    with ExitStack() as parts:
        first, second = (Worker(run_dir, device, copies, shape, 9, _BLOCKS, parts) for _ in range(2))
        scattered = torch.randperm(_BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
        for number in range(_ROUNDS):
            name, (to, of) = (
                f"{copies[0]} {shape} {number}",
                (scattered[number:][:_PROMPT_BLOCKS], scattered[-_PROMPT_BLOCKS:]),
            )
            order = first.store(name, of)
            first.compute("before", of)
            first.compute(name, of)
            start = time.perf_counter()
            first.step(((), (order,)))
            bad += first.wait(stores=1)
            first_store_ms = first_store_ms or (time.perf_counter() - start) * 1e3  # it joins the session, too
            load = second.load(name, to)
            second.compute("preempted", to)
            second.step(((load,), ()))
            bad += second.wait(loads=1)
            wrong += second.wrong_blocks(name, to)
        by_thread = sum(isinstance(each.side._shard, OffloadShard) for each in (first, second))
        taken_mib = (free_bytes - _free_bytes(device)) >> 20
    may_be_threads = copies == "thread" or device == "cpu"
    return {
        "ok": not wrong and not bad and (may_be_threads or not by_thread),
        "wrong_blocks": wrong,
        "failed": bad,
        "by_thread": by_thread,
        "first_store_ms": first_store_ms,
        "taken_mib": taken_mib,
    }


def _free_bytes(device: str) -> int:
    """Of the device; 0 without one."""
    return int(torch.cuda.mem_get_info()[0]) if device == "cuda" else 0


def steps_beside_copies(run_dir: Path, device: str, copies: str, rounds: int) -> Report:
    """How much longer a step takes in which a load, or a store, is ordered: the median of rounds."""
    with ExitStack() as parts:
        worker = Worker(run_dir, device, copies, "2BNHC", 32, 4 * _STEP_BLOCKS, parts)
        names = (f"{copies[0]} beside {number}" for number in count())
        blocks = [range(first, first + _STEP_BLOCKS) for first in range(0, worker.blocks, _STEP_BLOCKS)]
        worker.step(((), (worker.store(known := next(names), blocks[0]),)))
        bad = worker.wait(stores=1)
        ratios: dict[str, list[float]] = {"loads": [], "stores": []}
        alone: list[float] = []
        for _ in range(rounds):
            for kind, kept in ratios.items():
                none: list[Orders] = [((), ())] * _STEPS
                if kind == "loads":
                    orders: list[Orders] = [((worker.load(known, blocks[at % 4]),), ()) for at in range(_STEPS)]
                else:
                    orders = [((), (worker.store(next(names), blocks[at % 4]),)) for at in range(_STEPS)]
                before = _timed(worker, none)
                beside = _timed(worker, orders)
                bad += worker.wait(**{kind: _STEPS})
                alone += [before, _timed(worker, none)]
                kept.append(2 * beside / sum(alone[-2:]))
        copied_bytes = _STEP_BLOCKS * worker.block_bytes
    return {
        "ok": not bad,
        "failed": bad,
        "step_ms": median(alone) * 1e3,
        "copied_mib_in_a_step": copied_bytes / (1 << 20),
        **{f"steps_beside_{kind}_ratio": median(kept) for kind, kept in ratios.items()},
        "spread": {kind: [min(kept), max(kept)] for kind, kept in ratios.items()},
    }


def _timed(worker: Worker, orders: list[Orders]) -> float:
    start = time.perf_counter()
    for each in orders:
        worker.step(each)
    return (time.perf_counter() - start) / len(orders)


def main() -> int:
    """Run all of it on a daemon of its own."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.connector", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="rounds of the timed steps (default: %(default)s)")
    arguments = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as the connector does
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report: Report = {"device": device}
    with tempfile.TemporaryDirectory(prefix="kvcached-") as directory, supervised(Path(directory), _CONFIG) as daemon:
        kinds = ("process", "thread") if device == "cpu" else ("process", "thread", "daemon")
        for copies in kinds:
            found = {shape: blocks_of_late_kernels(daemon.run_dir, device, copies, shape) for shape in _SHAPES}
            found["beside"] = steps_beside_copies(daemon.run_dir, device, copies, arguments.rounds)
            report[copies] = found
    ok = all(each["ok"] for copies in kinds for each in report[copies].values())
    report = {"ok": ok, **report}
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
