"""The layout of one block of KV cache, in bytes.

A `Layout` is a list of groups. A group is a set of layers whose pages have the same shape. A model with full attention
has one group, a model with latent attention (MLA) has one group without V, a hybrid model has several groups. Sizes are
integers and are those of **one shard**: heads are already divided by the tensor-parallel degree.

Page of one layer and one block, in bytes: ``K [block_size, kv_heads, head_dim] · V [block_size, kv_heads, v_head_dim] ·
scales [scale_bytes]``. Scales lie inside the block, so that every copy includes them.

Two orders of pages in a pool of S slots:

* ``block_first`` ``[slot][layer][page]``: a block is one contiguous row. Copies of whole blocks are large.
* ``layer_first`` ``[layer][slot][page]``: a layer is one contiguous tensor, as most attention kernels expect it.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal, cast

import msgspec

from kvcached_client.blocks.host_layout import host_parts
from kvcached_client.errors import bad_value

DTYPE_SIZE_BYTES: dict[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
DType = Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"]
PageOrder = Literal["block_first", "layer_first"]

#: Fields that models with state-space layers have.
STATE_SPACE_FIELDS = (
    "mamba_d_state",
    "mamba_state_dim",
    "ssm_state_size",
    "state_size",
    "hybrid_override_pattern",
)
#: Fields by which layers, or their heads, differ in ways that are not looked into here.
_SHAPES_UNKNOWN = (
    *STATE_SPACE_FIELDS,
    *("attn_layer_period", "attn_layer_indices", "full_attention_interval", "full_attn_idxs", "attn_type_list"),
    *("block_types", "layers_block_type", "hybrid_layer_ids", "block_configs", "cross_attention_layers"),
    *("attention_chunk_size", "num_kv_shared_layers", "index_head_dim", "is_encoder_decoder"),
    *("linear_attn_config", "layer_group_size", "use_cla"),
    *("multi_query", "multi_query_attention", "multi_query_group_num", "num_kv_heads", "n_head_kv"),
)
#: A pool is one mapping. A larger one is a mistake in the configuration: no machine has so much memory.
POOL_SIZE_BYTES_MAX = 1 << 46


class KvGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Layers whose pages have one shape.

    Attributes:
        layers: number of layers.
        kv_heads: KV heads held by one shard.
        head_dim: elements of K per head and token (MLA: latent rank + rotary dimension).
        v_head_dim: elements of V per head and token; 0 without V (MLA).
        dtype: element type.
        scale_bytes: bytes of quantisation scales in one layer's page of one block.
        replicated: every shard holds the same bytes (MLA). Lower tiers store one copy if all groups are replicated.
    """

    layers: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: DType
    scale_bytes: int = 0
    replicated: bool = False

    def k_bytes(self, block_size: int) -> int:
        """Bytes of K in one layer's page."""
        return block_size * self.kv_heads * self.head_dim * DTYPE_SIZE_BYTES[self.dtype]

    def v_bytes(self, block_size: int) -> int:
        """Bytes of V in one layer's page; 0 for a group without V."""
        return block_size * self.kv_heads * self.v_head_dim * DTYPE_SIZE_BYTES[self.dtype]

    def page_bytes(self, block_size: int) -> int:
        """Bytes of one layer of one block."""
        return self.k_bytes(block_size) + self.v_bytes(block_size) + self.scale_bytes

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of all the group's layers of one block."""
        return self.layers * self.page_bytes(block_size)


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The shape of a block on one shard, and the number of shards."""

    block_size: int
    shards: int
    groups: tuple[KvGroup, ...]
    order: PageOrder = "layer_first"

    @property
    def replicated(self) -> bool:
        """Whether every shard holds the same bytes, so that lower tiers store them once."""
        return all(group.replicated for group in self.groups)

    @property
    def host_parts(self) -> int:
        """Parts of a block in lower tiers, `bytes_per_block` each: one per shard, or one for all shards."""
        return host_parts(self.shards, replicated=self.replicated)

    def bytes_per_block(self) -> int:
        """Bytes of one block on one shard, with every group, layer and scale."""
        return sum(group.bytes_per_block(self.block_size) for group in self.groups)

    def blocks_per_budget(self, budget_bytes: int) -> int:
        """Number of blocks that fit into `budget_bytes` of one shard's memory."""
        return budget_bytes // self.bytes_per_block()

    def pool_bytes(self, slots: int) -> int:
        """Bytes of one shard's pool of `slots` slots."""
        return slots * self.bytes_per_block()

    def page_offset(self, slots: int, group_index: int, layer: int) -> int:
        """Byte offset of slot 0's page of a layer (counted inside its group) in a pool of `slots` slots."""
        before = sum(group.bytes_per_block(self.block_size) for group in self.groups[:group_index])
        within = layer * self.groups[group_index].page_bytes(self.block_size)
        return before + within if self.order == "block_first" else (before + within) * slots

    def slot_stride_bytes(self, group_index: int) -> int:
        """Bytes between the pages of a layer in neighbouring slots."""
        if self.order == "block_first":
            return self.bytes_per_block()
        return self.groups[group_index].page_bytes(self.block_size)

    def fingerprint(self) -> str:
        """32 hex digits that two layouts share only if pools of as many slots are the same, byte for byte."""
        canonical = msgspec.json.encode(self, order="sorted")
        return hashlib.blake2b(canonical, digest_size=16, person=b"kvcached layout1").hexdigest()

    def block_fingerprint(self) -> str:
        """32 hex digits that two layouts share only if their blocks are the same, byte for byte, outside their pools.

        Whatever the order of pages in a pool, a block in the host pool and in storage is one row of pages.
        """
        return msgspec.structs.replace(self, order="layer_first").fingerprint()

    def check(self) -> None:
        """Refuse impossible sizes.

        Raises:
            BadRequest: a size is not positive, V is partial, or a block does not fit any pool.
        """
        problems = [
            *([] if self.block_size > 0 else [f"block_size is {self.block_size}"]),
            *([] if self.shards > 0 else [f"shards is {self.shards}"]),
            *([] if self.groups else ["there is no group"]),
        ]
        for index, group in enumerate(self.groups):
            least = {"layers": 1, "kv_heads": 1, "head_dim": 1, "v_head_dim": 0, "scale_bytes": 0}
            problems += [
                f"groups[{index}].{name} is {getattr(group, name)}"
                for name, minimum in least.items()
                if getattr(group, name) < minimum
            ]
        if not problems and self.bytes_per_block() > POOL_SIZE_BYTES_MAX:
            problems.append(f"one block takes {self.bytes_per_block()} bytes")
        if problems:
            raise bad_value("layout: " + "; ".join(problems), "sizes are positive integers of one shard")


def layout_from_model_config(
    config: dict[str, Any],
    *,
    block_size: int,
    shards: int,
    kv_dtype: DType | None = None,
    order: PageOrder = "layer_first",
) -> Layout:
    """The layout of a Hugging Face ``config.json`` under tensor parallelism over `shards` shards.

    Full attention splits its KV heads over the shards. If there are fewer heads than shards, heads are repeated: a
    single head is then the same on every shard. Latent attention (a config with ``kv_lora_rank``, as that of
    DeepSeek-V2 and V3) has one latent vector per token, the same on every shard, and no V.

    For example ``layout_from_model_config(json.loads(Path("config.json").read_text()), block_size=16, shards=1)``.

    Raises:
        BadRequest: a needed field is missing, heads do not divide, or a field says that the model's layers differ, or
            do not keep all tokens.
    """
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise _unusable("text_config is not an object")
    _check_layers_alike(text)
    layers = _integer(text, "num_hidden_layers")
    dtype = kv_dtype or _kv_dtype(text)
    if text.get("kv_lora_rank") is not None:
        latent = _integer(text, "kv_lora_rank") + _integer(text, "qk_rope_head_dim")
        group = KvGroup(layers=layers, kv_heads=1, head_dim=latent, v_head_dim=0, dtype=dtype, replicated=True)
    else:
        heads = _integer(text, "num_attention_heads")
        kv_heads = _integer(text, "num_key_value_heads") if text.get("num_key_value_heads") is not None else heads
        if text.get("head_dim") is None:
            head_dim = _integer(text, "hidden_size") // heads
        else:
            head_dim = _integer(text, "head_dim")
        if kv_heads % shards and shards % kv_heads:
            raise _unusable(f"num_key_value_heads {kv_heads} and {shards} shards do not divide each other")
        group = KvGroup(
            layers=layers,
            kv_heads=max(1, kv_heads // shards),
            head_dim=head_dim,
            v_head_dim=_integer(text, "v_head_dim") if text.get("v_head_dim") is not None else head_dim,
            dtype=dtype,
            replicated=kv_heads == 1 < shards,
        )
    layout = Layout(block_size=block_size, shards=shards, groups=(group,), order=order)
    layout.check()
    return layout


def _check_layers_alike(config: dict[str, Any]) -> None:
    """All layers have full attention, with heads that `num_key_value_heads` counts.

    Raises:
        BadRequest: not all have, or it is not known.
    """
    kinds = config.get("layer_types")
    if kinds and not (isinstance(kinds, list) and all(each == "full_attention" for each in kinds)):
        raise _unusable(f"layer_types is {str(kinds)[:100]}; kinds of layers are groups")
    unknown = [name for name in _SHAPES_UNKNOWN if config.get(name)]
    if not kinds and config.get("use_sliding_window", True) and _is_window(config):
        unknown.append("sliding_window")
    if unknown:
        value = str(config[unknown[0]])[:100]
        raise _unusable(f"{unknown[0]} is {value}: what its layers keep is not known here")


def _is_window(config: dict[str, Any]) -> bool:
    """Whether layers keep fewer tokens than the model can have."""
    window, most = config.get("sliding_window"), config.get("max_position_embeddings")
    return bool(window) and not (isinstance(window, int) and isinstance(most, int) and window >= most)


def _integer(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise _unusable(f"{name} is {repr(value)[:100]}, expected a positive integer")
    return value


def _kv_dtype(config: dict[str, Any]) -> DType:
    named = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    if not isinstance(named, str) or named not in DTYPE_SIZE_BYTES:
        raise _unusable(f"dtype {named!r} is not one of {', '.join(DTYPE_SIZE_BYTES)}")
    return cast("DType", named)


def _unusable(reason: str) -> Exception:
    return bad_value(f"model config: {reason}", "or write the layout out in the configuration")
