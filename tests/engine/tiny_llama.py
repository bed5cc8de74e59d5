"""A Llama that runs in milliseconds, its shards as threads of the test."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import msgspec
import torch
from torch import Tensor

from examples.llama_engine.cache import Cache
from examples.llama_engine.config import Limits, LlamaConfig
from examples.llama_engine.generation import GenerationRequest, GenerationResult
from examples.llama_engine.kv_tensors import KvMemory
from examples.llama_engine.messages import Step, StepDone
from examples.llama_engine.model import Llama
from examples.llama_engine.scheduler import Scheduler, StepRunner
from examples.llama_engine.shard import ShardExecutor
from examples.llama_engine.shard_group import join_answers
from examples.llama_engine.weights import load_weights, random_source
from kvcached_client.blocks.layout import Layout, layout_from_model_config
from kvcached_client.tensors import layer_tensors
from tests.engine.fake_host import FakeHost
from tests.engine.fakes import FakeClient, fake_pool

TINY = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=199,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    tie_word_embeddings=False,
)
#: Its one head of K and V is the same on every shard.
TINY_MQA = msgspec.structs.replace(TINY, num_key_value_heads=1)
BLOCK_SIZE = 4
LIMITS = Limits(chunk_tokens=16, step_tokens=48, running_max=8)


def layout_of(config: LlamaConfig, shards: int = 1) -> Layout:
    """The float32 layout of a pool for `config`."""
    return layout_from_model_config(
        msgspec.to_builtins(config), block_size=BLOCK_SIZE, shards=shards, kv_dtype="float32"
    )


class ThreadedAllReduce:
    """A sum over shards that are threads, in shard order on each of them."""

    def __init__(self, shards: int) -> None:
        self._parts: list[Tensor | None] = [None] * shards
        self._barrier = threading.Barrier(shards, timeout=30)

    def __call__(self, shard: int, tensor: Tensor) -> None:
        self._parts[shard] = tensor.clone()
        self._barrier.wait()
        total = torch.stack([part for part in self._parts if part is not None]).sum(0)
        self._barrier.wait()
        tensor.copy_(total)


class ThreadedShards:
    """`ShardGroup` without processes: the same executors, over fake pools."""

    def __init__(
        self,
        config: LlamaConfig = TINY,
        *,
        slots: int = 256,
        shards: int = 1,
        seed: int = 3,
        host: FakeHost | None = None,
    ) -> None:
        host = host or FakeHost()
        host.pools = [fake_pool(layout_of(config, shards), slots, shard) for shard in range(shards)]
        memories = []
        for shard, pool in enumerate(host.pools):
            layers = [layer_tensors(pool, layer) for layer in range(config.num_hidden_layers)]
            memories.append(KvMemory(cast("list[tuple[Tensor, Tensor]]", layers), host.waiter(shard)))
        self._executors = Executors(config, memories, seed)

    def run(self, step: Step) -> StepDone:
        """Run a step on every shard."""
        return self._executors.run(step)


class Executors:
    """One executor a shard, each in a thread."""

    def __init__(self, config: LlamaConfig, memories: list[KvMemory], seed: int) -> None:
        torch.set_num_threads(1)
        shards = len(memories)
        reduce = ThreadedAllReduce(shards)
        self._threads = ThreadPoolExecutor(shards)
        self._executors = []
        for shard, memory in enumerate(memories):
            weights = load_weights(config, random_source(seed), shard, shards, torch.device("cpu"))
            model = Llama(config, weights, lambda tensor, shard=shard: reduce(shard, tensor))  # type: ignore[misc]
            self._executors.append(ShardExecutor(model, memory.layers, memory.wait_layer, samples=shard == 0))

    def use(self, memories: list[KvMemory]) -> None:
        """The same memory, mapped anew."""
        for executor, memory in zip(self._executors, memories, strict=True):
            executor.use(memory)

    def run(self, step: Step) -> StepDone:
        """Run a step on every shard."""
        return join_answers(list(self._threads.map(ShardExecutor.run, self._executors, [step] * len(self._executors))))


def generate(
    client: FakeClient, shards: StepRunner, requests: list[GenerationRequest], limits: Limits = LIMITS
) -> list[GenerationResult]:
    """Run requests together through a scheduler of their own; results in their order."""
    scheduler = Scheduler(cast("Cache", client), shards, limits)
    names = [scheduler.submit(request) for request in requests]
    results: dict[str, GenerationResult] = {}
    while not scheduler.idle:
        results |= {result.name: result for result in scheduler.step()}
    return [results[name] for name in names]


def prompt(length: int, seed: int = 0) -> list[int]:
    """Tokens of the tiny vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, TINY.vocab_size, (length,), generator=generator).tolist()
