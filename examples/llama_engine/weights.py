"""One shard's weights: read from a checkpoint, or drawn from a seed where there is none.

Split as Megatron does it: q, k, v, gate and up by output rows (heads stay whole), o and down by input columns, so that
one sum over the shards closes attention and one closes the MLP. Norms, embedding and head are on every shard.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from examples.llama_engine.config import LlamaConfig, ModelError

#: Gives the whole tensor of a checkpoint name and a shape, in float32.
Source = Callable[[str, tuple[int, ...]], Tensor]

#: Wider than training would start from: random weights must still prefer one token clearly, and look at the context.
_RANDOM_GAIN = 2.0


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's part on one shard. Matrices are [out, in]."""

    attention_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's part on one shard."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]


def weight_source(model_dir: Path, seed: int) -> Source:
    """The checkpoint in `model_dir`, or random weights if it holds a config.json only."""
    return _checkpoint_source(model_dir) if any(model_dir.glob("*.safetensors")) else random_source(seed)


def random_source(seed: int) -> Source:
    """Weights from a seed: the same on every shard, in any order of asking."""

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        std = 1.0 if "embed" in name else _RANDOM_GAIN / shape[1] ** 0.5
        return torch.empty(shape).normal_(0.0, std, generator=generator)

    return draw


def _checkpoint_source(model_dir: Path) -> Source:
    index = model_dir / "model.safetensors.index.json"
    file_of: dict[str, str] = json.loads(index.read_bytes())["weight_map"] if index.exists() else {}

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        path = model_dir / file_of.get(name, "model.safetensors")
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        if tensor.shape != shape:
            raise ModelError(f"{path}: {name} is {tuple(tensor.shape)}, config.json says {shape}")
        return tensor.float()

    return read


def head_range(heads: int, shard: int, shards: int) -> tuple[int, int]:
    """The heads [first, end) that a shard holds; fewer heads than shards are repeated over neighbours."""
    first = shard * heads // shards
    return first, first + max(1, heads // shards)


def load_weights(config: LlamaConfig, source: Source, shard: int, shards: int, device: torch.device) -> Weights:
    """This shard's part of every tensor, on the device where it computes.

    Raises:
        ModelError: query heads or MLP columns do not divide by the number of shards, or a shape is wrong.
    """
    if config.num_attention_heads % shards or config.intermediate_size % shards:
        raise ModelError(f"{config.num_attention_heads} heads x {config.intermediate_size} do not split over {shards}")
    hidden = config.hidden_size

    def placed(name: str, shape: tuple[int, ...]) -> Tensor:
        return source(name, shape).to(device)

    embedding = placed("model.embed_tokens.weight", (config.vocab_size, hidden))
    tied = config.tie_word_embeddings
    return Weights(
        embedding=embedding,
        layers=tuple(_load_layer(config, placed, layer, shard, shards) for layer in range(config.num_hidden_layers)),
        norm=placed("model.norm.weight", (hidden,)),
        head=embedding if tied else placed("lm_head.weight", (config.vocab_size, hidden)),
    )


def _load_layer(config: LlamaConfig, source: Source, layer: int, shard: int, shards: int) -> LayerWeights:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    q_part = _scaled(head_range(config.num_attention_heads, shard, shards), head_dim)
    kv_part = _scaled(head_range(config.num_key_value_heads, shard, shards), head_dim)
    mlp_part = _scaled((shard, shard + 1), inner // shards)

    def whole(name: str, *shape: int) -> Tensor:
        return source(f"model.layers.{layer}.{name}.weight", shape)

    # clone: a slice would keep the whole tensor of every shard in memory
    return LayerWeights(
        attention_norm=whole("input_layernorm", hidden),
        q=whole("self_attn.q_proj", q_size, hidden)[q_part].clone(),
        k=whole("self_attn.k_proj", kv_size, hidden)[kv_part].clone(),
        v=whole("self_attn.v_proj", kv_size, hidden)[kv_part].clone(),
        o=whole("self_attn.o_proj", hidden, q_size)[:, q_part].clone(),
        mlp_norm=whole("post_attention_layernorm", hidden),
        gate=whole("mlp.gate_proj", inner, hidden)[mlp_part].clone(),
        up=whole("mlp.up_proj", inner, hidden)[mlp_part].clone(),
        down=whole("mlp.down_proj", hidden, inner)[:, mlp_part].clone(),
    )


def _scaled(bounds: tuple[int, int], unit: int) -> slice:
    return slice(bounds[0] * unit, bounds[1] * unit)
