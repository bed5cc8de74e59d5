"""A CUDA graph over the tensors of a pool replays after daemon and worker were killed: ``python -m tests.gpu.graphs``.

A graph holds addresses. This process keeps what it has mapped, and recorded, while the next daemon and the next worker
map the same memory. What the replay writes is read through a second mapping, made in the new session. JSON on stdout;
status 1 if something is not as it should be. Where torch has no CUDA device, what would be recorded is called instead.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, Final

import torch

from kvcached_client import Client, KeyChain, Lease, MappedPool, map_pool
from kvcached_client.tensors import layer_tensors
from tests.daemon.supervised import Supervised, supervised

_CONFIG: Final = """
session_ttl_ms = 20000

[[replica]]
name = "default"
model = "graphs"
device = "cuda"
block_size = 16
shards = 1
slots = 64
[[replica.group]]
layers = 4
kv_heads = 4
head_dim = 64
v_head_dim = 64
dtype = "float32"

[host]
size_bytes = 67108864
slab_bytes = 8388608
"""
_BLOCKS: Final = 3
_DEADLINE_MS: Final = 20_000


class Engine:
    """A client, its pool, and a recorded step that writes a value into all K and V of some slots."""

    def __init__(self, run_dir: Path) -> None:
        self.client = Client.connect(run_dir, deadline_ms=_DEADLINE_MS, failures="miss")
        self.pool = map_pool(self.client.session, deadline_ms=_DEADLINE_MS)
        self.tensors = _tensors(self.pool)
        device = self.tensors[0].device
        self._slots = torch.zeros(_BLOCKS, dtype=torch.int64, device=device)
        self._values = torch.zeros(_BLOCKS, device=device)
        self._replay: Callable[[], object] | None = None
        self._requests = count()

    def compute(self, number: int) -> list[int]:
        """Serve a prompt whose K and V are its number, by the recorded step; returns its slots."""
        lease = self._acquire(number)
        slots: list[int] = lease.block_table[:_BLOCKS].tolist()
        self._slots.copy_(torch.tensor(slots))
        self._values.fill_(number)
        if self._replay is None:  # what warms up writes, too
            self._replay = _recorded(self._write)
        self._replay()
        _await_device()
        lease.commit(self._chain(number).token_count)
        lease.release()
        return slots

    def hit_blocks(self, number: int) -> int:
        """How much of a prompt is hit."""
        with self._acquire(number) as lease:
            return lease.hit_blocks

    def rejoin(self) -> None:
        """Go on with the next daemon."""
        self.client.match(self._chain(0))
        self.client.rejoin()

    def _acquire(self, number: int) -> Lease:
        return self.client.acquire(f"request-{next(self._requests)}", self._chain(number), full=True)

    def _chain(self, number: int) -> KeyChain:
        size = self.pool.layout.block_size
        return self.client.chain(range(number * 1000, number * 1000 + _BLOCKS * size))

    def _write(self) -> None:
        for tensor in self.tensors:
            tensor.index_put_((self._slots,), self._values.view(-1, 1, 1, 1).expand(-1, *tensor.shape[1:]))


def replay_after_restart(daemon: Supervised) -> dict[str, Any]:
    """Write by a graph, kill daemon and worker, write by the same graph, and read all through another mapping."""
    engine = Engine(daemon.run_dir)
    with engine.client, engine.pool:
        addresses = [tensor.data_ptr() for tensor in engine.tensors]
        before = engine.compute(1)
        daemon.kill_and_wait()
        engine.rejoin()
        after = engine.compute(2)
        with map_pool(engine.client.session, deadline_ms=_DEADLINE_MS) as again:
            seen = _tensors(again)
            found = {
                "addresses_kept": [tensor.data_ptr() for tensor in engine.tensors] == addresses,
                "bytes_before": all(bool((tensor[before] == 1).all()) for tensor in seen),
                "bytes_after": all(bool((tensor[after] == 2).all()) for tensor in seen),
                "hits": [engine.hit_blocks(number) for number in (1, 2)] == [_BLOCKS, _BLOCKS],
            }
            return {"ok": all(found.values()), "device": engine.pool.device, "by_graph": _has_graphs(), **found}


def _tensors(pool: MappedPool) -> list[torch.Tensor]:
    layers = range(pool.layout.groups[0].layers)
    return [tensor for layer in layers for tensor in layer_tensors(pool, layer) if tensor is not None]


def _has_graphs() -> bool:
    return torch.cuda.is_available()


def _await_device() -> None:
    if _has_graphs():
        torch.cuda.synchronize()


def _recorded(step: Callable[[], None]) -> Callable[[], object]:
    """The step as a graph, after one run of it that is none, as torch demands."""
    if not _has_graphs():
        return step
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def main() -> int:
    """Run it on a daemon of its own."""
    with tempfile.TemporaryDirectory(prefix="kvcached-") as directory, supervised(Path(directory), _CONFIG) as daemon:
        report = replay_after_restart(daemon)
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
