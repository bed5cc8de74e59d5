"""Torch views of a mapped pool."""

from __future__ import annotations

import pytest

from kvcached_client import Layout
from kvcached_client.blocks.layout import DType
from tests.client.fake_daemon import FakeDaemon
from tests.client.pools import LAYOUTS, SLOTS, attention, mapped

torch = pytest.importorskip("torch")

from kvcached_client.tensors import layer_tensors  # noqa: E402 - needs torch


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"])
def test_torch_tensors_share_the_memory_and_have_the_layouts_type(
    daemon: FakeDaemon, memory: list[int], dtype: DType
) -> None:
    """What is written through a tensor is in the pool, in the layout's own element type."""
    layout = Layout(block_size=4, shards=1, groups=(attention(dtype),), order="block_first")
    with mapped(daemon, layout, memory) as pool:
        keys, values = layer_tensors(pool, 1)
        assert values is not None
        assert keys.dtype == values.dtype == getattr(torch, dtype)
        assert tuple(keys.shape) == (SLOTS, 4, 2, 8)
        assert tuple(values.shape) == (SLOTS, 4, 2, 4)
        values[5] = torch.ones(values[5].shape).to(values.dtype)
        raw = pool.keys_values(1)[1]
        assert raw is not None
        written = torch.ones(1).to(values.dtype).view(torch.uint8).numpy().tobytes()
        assert raw[5].tobytes() == written * raw[5].size


def test_torch_tensors_have_no_v_where_the_layout_has_none(daemon: FakeDaemon, memory: list[int]) -> None:
    """A latent group gives K alone."""
    with mapped(daemon, LAYOUTS["mla-layer_first"], memory) as pool:
        assert layer_tensors(pool, 0)[1] is None
