"""A shard process: one tensor-parallel part of the model over one shard of the daemon's pool, or blocks of its own.

Started by exec with the numbers of inherited sockets: ``python -m examples.llama_engine.shard 7 8``, the second one for
the copy thread. It does what the scheduler says and decides nothing.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from examples.llama_engine.attention import PagedAttention, PagedRows
from examples.llama_engine.config import read_config
from examples.llama_engine.copier import Copier
from examples.llama_engine.graphs import DecodeGraphs, Recorder
from examples.llama_engine.kv_tensors import KvMemory, mapped_memory, nothing_to_close, own_device, own_memory
from examples.llama_engine.layer_waits import LayerWaits, WaitLayer
from examples.llama_engine.messages import Channel, ChannelClosed, Ready, Remap, Sample, Setup, Step, StepDone, StepItem
from examples.llama_engine.model import AllReduce, Llama
from examples.llama_engine.weights import load_weights, weight_source
from kvcached_client.errors import KvcachedError
from kvcached_client.pool import map_pool

_PR_SET_PDEATHSIG = 1
_RENDEZVOUS_TIMEOUT = timedelta(seconds=60)

_log = logging.getLogger("llama_engine")


class ShardExecutor:
    """Runs steps: model and memory of one shard.

    Args:
        model: this shard's part.
        pool: per layer (K, V) of this shard, each [slots, block_size, kv_heads, head_dim].
        wait_layer: `MappedPool.wait_layer` with a deadline, or a double.
        samples: whether this shard chooses the tokens (one does, for all have the same hidden states).
        close: says that the memory is not used any more.
        graphs: compute decode steps; without them, they are computed as all others.
    """

    def __init__(
        self,
        model: Llama,
        pool: Sequence[tuple[Tensor, Tensor]],
        wait_layer: WaitLayer,
        *,
        samples: bool,
        close: Callable[[], None] = nothing_to_close,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._wait_layer = wait_layer
        self._samples = samples
        self._graphs = graphs
        self.close = close

    def use(self, memory: KvMemory) -> None:
        """Wait for loads by this mapping of the same memory. K and V are used where they are: graphs hold addresses."""
        self.close()
        _, self._wait_layer, self.close = memory

    @torch.inference_mode()
    def run(self, step: Step) -> StepDone:
        """Compute a step's rows; when this returns, their K and V are in the pool.

        A load that fails does not end the step: the other shards are in the same sums, and wait.
        """
        waits = LayerWaits(self._wait_layer, [item.loads for item in step.items])
        hidden = None if self._graphs is None else self._graphs.hidden(step.items, waits)
        if hidden is None:
            hidden = self._forward(step.items, waits)
        done = StepDone(self._sample(step.items, hidden), waits.unread)
        device = self._pool[0][0].device
        if device.type == "cuda":  # the scheduler commits what is written, and others may have the slots of a release
            torch.cuda.current_stream(device).synchronize()
        return done

    def _forward(self, items: Sequence[StepItem], waits: LayerWaits) -> Tensor:
        """Hidden states of all rows."""
        requests: list[PagedRows] = []
        first, device = 0, self._pool[0][0].device
        for item in items:
            rows = len(item.tokens) // 4
            positions = torch.arange(item.start, item.start + rows, device=device)
            requests.append(PagedRows(first, positions, _int64(item.block_table, device)))
            first += rows
        return self._model.forward(
            _int64(b"".join(item.tokens for item in items), device),
            torch.cat([request.positions for request in requests]),
            PagedAttention(self._pool, requests, waits),
        )

    def _sample(self, items: Sequence[StepItem], hidden: Tensor) -> list[Sample]:
        ends = accumulate(len(item.tokens) // 4 for item in items)
        sampled = [(item, end - 1) for item, end in zip(items, ends, strict=True) if item.sample]
        if not self._samples or not sampled:
            return []
        logits = self._model.logits(hidden[[last for _, last in sampled]])
        tokens = logits.argmax(dim=-1).tolist()
        return [
            Sample(token, row.cpu().numpy().tobytes() if item.logits else b"")
            for (item, _), token, row in zip(sampled, tokens, logits, strict=True)
        ]


def _int64(packed: bytes, device: torch.device) -> Tensor:
    return torch.from_numpy(np.frombuffer(packed, dtype=np.int32).astype(np.int64)).to(device)


def join_group(setup: Setup) -> AllReduce:
    """Meet the other shards; returns the sum over all of them."""
    if setup.shards == 1:
        return lambda _: None
    # all shards are on this node, whose name need not resolve
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(setup.rendezvous, setup.shards)  # type: ignore[attr-defined]  # public, not in __all__
    dist.init_process_group("gloo", store=store, rank=setup.shard, world_size=setup.shards, timeout=_RENDEZVOUS_TIMEOUT)
    return dist.all_reduce


def start_executor(setup: Setup, memory: KvMemory) -> ShardExecutor:
    """Load the weights and meet the other shards.

    Raises:
        ModelError: the model cannot be read or split.
    """
    config = read_config(Path(setup.model_dir))
    source, device = weight_source(Path(setup.model_dir), setup.seed), memory.layers[0][0].device
    weights = load_weights(config, source, setup.shard, setup.shards, device)
    recorder = Recorder(join_group(setup), divides=setup.shards > 1)
    model = Llama(config, weights, recorder)
    return ShardExecutor(
        model,
        memory.layers,
        memory.wait_layer,
        samples=setup.shard == 0,
        close=memory.close,
        graphs=DecodeGraphs(model, memory.layers, recorder) if setup.cuda_graphs else None,
    )


def prepare(setup: Setup, copies: Channel) -> tuple[ShardExecutor, Ready]:
    """Get memory, start the copy thread if that is the shard's own, and load the model."""
    if setup.own is not None:
        memory, pages = own_memory(setup.own.layout, setup.own.blocks, own_device(setup.device, setup.shard))
        executor = start_executor(setup, memory)
        Copier(copies, setup.shard, pages).start()
        return executor, Ready(pages.block_bytes, pages.fingerprint)
    if setup.session is not None:
        # its attach connection stays open for as long as this process uses the memory
        return start_executor(setup, mapped_memory(map_pool(setup.session, setup.shard), setup.device)), Ready()
    raise ValueError("a shard needs a session or blocks of its own")


def remap(executor: ShardExecutor, order: Remap, setup: Setup) -> None:
    """Map the pool in another session. Where that fails the old mapping is as good, but for waiting for loads."""
    try:
        executor.use(mapped_memory(map_pool(order.session, setup.shard), setup.device))
    except KvcachedError as error:
        _log.warning("shard %d cannot wait for loads: %s", setup.shard, error)


def _die_with_the_scheduler() -> None:
    """Ask the kernel for SIGKILL at the scheduler's death.

    A closed socket is seen after the step under way, and the daemon gives slots to nobody while this process lives.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def main() -> None:
    """Serve one scheduler until it closes the socket or dies."""
    _die_with_the_scheduler()
    # Ctrl-C reaches the whole process group; the scheduler decides when its shards end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # the order of a sum must not depend on how many threads were free
    torch.set_num_threads(1)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what that takes on CUDA
    torch.use_deterministic_algorithms(mode=True)
    channel, copies = (Channel(socket.socket(fileno=int(number))) for number in sys.argv[1:])
    executor: ShardExecutor | None = None
    try:
        setup = channel.receive_order()
        if not isinstance(setup, Setup):
            raise TypeError(f"expected Setup, got {type(setup).__name__}")
        executor, ready = prepare(setup, copies)
        channel.send(ready)
        while True:
            order = channel.receive_order()
            if isinstance(order, Step):
                channel.send(executor.run(order))
            elif isinstance(order, Remap):
                remap(executor, order, setup)
                channel.send(Ready())
            else:
                raise TypeError(f"expected Step or Remap, got {type(order).__name__}")
    except ChannelClosed:
        if executor is not None:
            executor.close()  # the daemon then takes the end of this process for no death


if __name__ == "__main__":
    main()
