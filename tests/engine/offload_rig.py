"""The example engine in offload mode with its shards as threads: real copies and a real daemon, no processes."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
import torch

from examples.llama_engine.attached_cache import AttachedCache
from examples.llama_engine.config import AttachedSettings, Limits, LlamaConfig
from examples.llama_engine.copier import Copier
from examples.llama_engine.copy_pipes import CopyPipes
from examples.llama_engine.generation import GenerationRequest, GenerationResult
from examples.llama_engine.kv_tensors import own_memory
from examples.llama_engine.messages import Channel
from examples.llama_engine.scheduler import Scheduler
from examples.llama_engine.shard_group import ShardDied
from kvcached_client import Admin
from kvcached_client.keys import namespace_root
from kvcached_client.offload import OffloadClient, OffloadLayout, new_instance
from kvcached_client.protocol.engine import HostStats
from tests.engine.tiny_llama import BLOCK_SIZE, LIMITS, TINY, Executors

SLABS, SLAB_BYTES = 32, 256 << 10
CONFIG = f"""
heartbeat_interval_ms = 100
session_ttl_ms = 10_000

[host]
size_bytes = {SLABS * SLAB_BYTES}
slab_bytes = {SLAB_BYTES}
verify = "always"

[offload]
namespaces_max = 16
"""
DEADLINE_MS = 5000


class OffloadEngine:
    """Scheduler, cache and copy threads of an engine, whose model is a tiny one under any name. A context manager."""

    def __init__(
        self,
        run_dir: Path,
        model: str = "tiny",
        *,
        blocks: int = 256,
        shards: int = 1,
        limits: Limits = LIMITS,
        connect: Callable[..., OffloadClient] = OffloadClient.connect,
        config: LlamaConfig = TINY,
    ) -> None:
        layout = config.layout(BLOCK_SIZE, shards)
        root = namespace_root(
            model=model, revision="", layout_fingerprint=layout.fingerprint(), block_size=BLOCK_SIZE, shards=shards,
            algorithm="blake3", generation=0,
        )  # fmt: skip
        self._parts = ExitStack()
        memories, ours = [], []
        for shard in range(shards):
            memory, pages = own_memory(layout, blocks, torch.device("cpu"))
            memories.append(memory)
            near, far = (Channel(end) for end in socket.socketpair())
            self._parts.callback(near.close)
            ours.append(near)
            Copier(far, shard, pages).start()
        connect = partial(
            connect, run_dir, engine="test", instance=new_instance(), label=model,
            layout=OffloadLayout(
                BLOCK_SIZE, shards, pages.block_bytes, pages.fingerprint, replicated=layout.replicated
            ),
        )  # fmt: skip
        pipes = CopyPipes(ours, lambda shard: ShardDied(f"shard {shard}"))
        self.cache = AttachedCache.over(pipes, connect, layout, root, AttachedSettings(blocks, BLOCK_SIZE, DEADLINE_MS))
        self._parts.callback(self.cache.close)
        self.scheduler = Scheduler(self.cache, Executors(config, memories, seed=3), limits)
        self._blocks = blocks

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.close()

    def run(self, *requests: GenerationRequest) -> list[GenerationResult]:
        """Run requests together; results in their order. What was computed is stored when it returns."""
        names = [self.scheduler.submit(request) for request in requests]
        return self.finish(names)

    def finish(self, names: list[str]) -> list[GenerationResult]:
        """Run until all is idle."""
        results: dict[str, GenerationResult] = {}
        while not self.scheduler.idle:
            results |= {result.name: result for result in self.scheduler.step()}
        self.cache.drain()
        assert self.cache.pool.free_blocks == self._blocks
        return [results[name] for name in names]

    def ask(self, tokens: list[int], max_tokens: int = 8) -> GenerationResult:
        """The answer to one prompt."""
        return self.run(GenerationRequest(prompt=tokens, max_tokens=max_tokens, logits=True))[0]


def bits(result: GenerationResult) -> bytes:
    """Every bit of the logits."""
    return np.stack(result.logits).tobytes()


def host_stats(run_dir: Path, model: str = "tiny") -> HostStats:
    """What the host pool has of a model, after a check that every invariant of the daemon holds and nothing is held."""
    with Admin.connect(run_dir) as admin:
        assert admin.check().violations == ()
        (host,) = (host for host in admin.stats().hosts if host.label == model)
    assert host.leases == 0
    return host


def counters(run_dir: Path) -> Counter[str]:
    """What the daemon has counted."""
    with Admin.connect(run_dir) as admin:
        return Counter(admin.stats().counters)


def write_model(directory: Path) -> None:
    """The tiny model, as engine processes find it."""
    config = {**msgspec.to_builtins(TINY), "model_type": "llama"}
    (directory / "config.json").write_bytes(msgspec.json.encode(config))
