"""Decode steps as CUDA graphs: each shape is recorded once, and replayed for every later step of that shape.

A graph holds addresses. Tokens, positions and block tables are written to where it reads them; K and V stay where the
shard has mapped the pool first, whoever copies into it and in whichever session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from examples.llama_engine.attention import DecodeAttention
from examples.llama_engine.layer_waits import LayerWaits
from examples.llama_engine.messages import StepItem
from examples.llama_engine.model import AllReduce, Llama

_TOKEN_BYTES = 4


class DeviceGraph:
    """What is queued between `begin` and `end` is not done, but recorded, and done by each `replay`."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def begin(self) -> None:
        """Record from now on; on a stream of `recording_stream`."""
        self._graph.capture_begin()

    def end(self) -> None:
        """Record no more."""
        self._graph.capture_end()

    def replay(self) -> None:
        """Queue all of it."""
        self._graph.replay()


@contextmanager
def recording_stream() -> Iterator[None]:
    """A stream that can be recorded, which the default stream cannot. What the default stream has is over before."""
    torch.cuda.synchronize()
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(aside):
        yield
    aside.synchronize()


class Recorder:
    """Sums over shards for the model, and graphs of its steps. A graph has what one device does: sums divide a step.

    Args:
        all_reduce: sums a tensor over all shards.
        divides: whether there is more than one shard.
    """

    def __init__(self, all_reduce: AllReduce, *, divides: bool) -> None:
        self._all_reduce = all_reduce
        self._divides = divides
        self._parts: list[Callable[[], object]] | None = None  #: of the step that is recorded
        self._graph: DeviceGraph | None = None

    def __call__(self, tensor: Tensor) -> None:
        """Sum, now or whenever the step is replayed."""
        if self._parts is None:
            self._all_reduce(tensor)
        elif self._divides:
            self._end(self._parts)
            self._parts.append(partial(self._all_reduce, tensor))
            self._begin()

    def record(self, step: Callable[[], Tensor]) -> Recorded:
        """Record a step, after it was computed once without a graph, as torch demands."""
        with recording_stream():
            step()
        with recording_stream():
            parts = self._parts = []
            try:
                self._begin()
                result = step()
                self._end(parts)
            finally:
                self._parts = None
        return Recorded(parts, result)

    def _begin(self) -> None:
        self._graph = DeviceGraph()
        self._graph.begin()

    def _end(self, parts: list[Callable[[], object]]) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.end()
            parts.append(graph.replay)


class Recorded(NamedTuple):
    """A step that can be replayed: graphs, and the sums between them."""

    parts: list[Callable[[], object]]
    result: Tensor

    def replay(self) -> Tensor:
        """What the step gives, from what is in its inputs now. The next replay overwrites it."""
        for part in self.parts:
            part()
        return self.result


class _Inputs(NamedTuple):
    """What the graphs of one shape read."""

    tokens: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    tables: Tensor  # int64 [rows, blocks]

    def fill(self, items: Sequence[StepItem]) -> None:
        """Write the rows of a step. What a table has behind its row's position is never read."""
        tables = np.zeros(self.tables.shape, np.int64)
        for row, item in enumerate(items):
            blocks = np.frombuffer(item.block_table, np.int32)[: tables.shape[1]]
            tables[row, : len(blocks)] = blocks
        self.tokens.copy_(torch.tensor([int.from_bytes(item.tokens, "little") for item in items]))
        self.positions.copy_(torch.tensor([item.start for item in items]))
        self.tables.copy_(torch.from_numpy(tables))


class DecodeGraphs:
    """Computes steps that have one row of each request.

    Shapes are the number of rows, and the blocks of the longest context, rounded up to a power of two.

    Args:
        model: this shard's part, which sums by `recorder`.
        pool: per layer (K, V) of this shard, each [slots, block_size, kv_heads, head_dim].
        recorder: of its steps.
    """

    def __init__(self, model: Llama, pool: Sequence[tuple[Tensor, Tensor]], recorder: Recorder) -> None:
        self._model = model
        self._pool = pool
        self._recorder = recorder
        self._shapes: dict[tuple[int, int], tuple[_Inputs, Recorded]] = {}

    def hidden(self, items: Sequence[StepItem], waits: LayerWaits) -> Tensor | None:
        """Hidden states of a step's rows; None where the step is none of these."""
        if any(len(item.tokens) != _TOKEN_BYTES for item in items):
            return None
        blocks = max(item.start for item in items) // self._pool[0][0].shape[1] + 1
        shape = len(items), 1 << (blocks - 1).bit_length()
        if any(item.loads for item in items):  # a graph waits for no layer; the same kernels without one do
            return self._compute(self._inputs(shape, items), lambda layer: _await(waits, len(items), layer))
        if shape not in self._shapes:
            inputs = self._inputs(shape, items)
            self._shapes[shape] = inputs, self._recorder.record(lambda: self._compute(inputs, _nothing_is_loading))
        inputs, recorded = self._shapes[shape]
        inputs.fill(items)
        return recorded.replay()

    def _inputs(self, shape: tuple[int, int], items: Sequence[StepItem]) -> _Inputs:
        device = self._pool[0][0].device
        tokens, positions = (torch.zeros(shape[0], dtype=torch.int64, device=device) for _ in range(2))
        inputs = _Inputs(tokens, positions, torch.zeros(shape, dtype=torch.int64, device=device))
        inputs.fill(items)
        return inputs

    def _compute(self, inputs: _Inputs, await_layer: Callable[[int], None]) -> Tensor:
        attend = DecodeAttention(self._pool, inputs.positions, inputs.tables, await_layer)
        return self._model.forward(inputs.tokens, inputs.positions, attend)


def _await(waits: LayerWaits, items: int, layer: int) -> None:
    for item in range(items):
        waits(item, layer)


def _nothing_is_loading(_: int) -> None:
    """The items of a recorded step have no loads."""
