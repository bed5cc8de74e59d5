"""Layouts, sealed memory, and pools mapped from a fake daemon."""

from __future__ import annotations

from kvcached_client import KvGroup, Layout, MappedPool, SessionGrant, map_pool
from kvcached_client.blocks.layout import DType
from kvcached_client.protocol.attach import Joined
from tests.client.fake_daemon import FakeDaemon
from tests.client.progress_page import sealed_memory

SLOTS = 6


def attention(dtype: DType = "float16", *, layers: int = 3, scale_bytes: int = 0) -> KvGroup:
    return KvGroup(layers=layers, kv_heads=2, head_dim=8, v_head_dim=4, dtype=dtype, scale_bytes=scale_bytes)


def latent() -> KvGroup:
    return KvGroup(layers=2, kv_heads=1, head_dim=12, v_head_dim=0, dtype="bfloat16", replicated=True)


LAYOUTS = {
    f"{name}-{order}": Layout(block_size=4, shards=1, groups=groups, order=order)
    for name, groups in {
        "attention": (attention(scale_bytes=8),),
        "mla": (latent(),),
        "both": (attention(), latent()),
    }.items()
    for order in ("block_first", "layer_first")
}


def offer(daemon: FakeDaemon, layout: Layout, descriptor: int) -> SessionGrant:
    daemon.memory = descriptor
    daemon.joined = Joined(
        kind="memfd", shard=0, epoch=5, layout=layout, slots=SLOTS, pool_bytes=layout.pool_bytes(SLOTS)
    )
    return SessionGrant(id=3, token=b"t" * 32, run_dir=str(daemon.run_dir))


def mapped(daemon: FakeDaemon, layout: Layout, memory: list[int]) -> MappedPool:
    memory.append(sealed_memory(layout.pool_bytes(SLOTS)))
    return map_pool(offer(daemon, layout, memory[-1]))
