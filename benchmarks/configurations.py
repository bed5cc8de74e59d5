"""What daemons are configured with where only their speed matters."""

from __future__ import annotations


def small_replica(name: str, *, model: str, block_size: int, slots: int) -> str:
    """A replica of one shard, whose blocks take 64 bytes a token (TOML)."""
    return f"""
[[replica]]
name = "{name}"
model = "{model}"
block_size = {block_size}
slots = {slots}

[[replica.group]]
layers = 1
kv_heads = 1
head_dim = 8
v_head_dim = 8
dtype = "float32"
"""
