"""Whether pages of SGLang's own pools are where kvcached takes them to be. Runs in SGLang's environment.

    python tests/sglang/own_pools.py

Fills a pool of states through SGLang's own functions, and compares each page's bytes with those at kvcached's places.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

from kvcached_client.sglang.host_pages import SIDE_POOLS, pages_of

LAYERS, SLOTS = 3, 6


def states() -> Any:
    """States of two kinds, of different sizes."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, SLOTS, 2, 5), conv=(torch.zeros(LAYERS, SLOTS, 7, dtype=torch.bfloat16),)
    )
    return MambaPoolHost(info, 2.0, 0, device_capacity=SLOTS, pin_memory=False, layout="page_first")


def differing(pool: Any, kind: str) -> list[int]:
    """Pages whose bytes are elsewhere."""
    source = torch.Generator().manual_seed(0)
    pages = pages_of(pool, SIDE_POOLS[kind])
    found = []
    for page in range(pages.blocks):
        size = pool.get_dummy_flat_data_page().numel()
        written = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=source)
        pool.set_from_flat_data_page(page * pool.page_size, written)
        there = b"".join(
            ctypes.string_at(layer.address + page * layer.stride_bytes, layer.page_bytes) for layer in pages.layers
        )
        if there != written.numpy().tobytes():
            found.append(page)
    return found


if __name__ == "__main__":
    raise SystemExit(str(wrong) if (wrong := differing(states(), "mamba")) else 0)
