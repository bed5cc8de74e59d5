"""Sizes of blocks, against the shapes of real models."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_client.blocks.layout import KvGroup, Layout, layout_from_model_config
from kvcached_client.errors import RequestError

#: config.json of published models, as far as it shapes the KV cache.
LLAMA_31_8B = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_31_70B = {
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192,
    "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_2_7B = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096, "torch_dtype": "float16",
}  # fmt: skip
QWEN_3_32B = {
    "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 5120, "head_dim": 128,
    "dtype": "bfloat16",
}  # fmt: skip
QWEN_25_05B = {
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 896,
    "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3 = {
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "shards", "bytes_per_token"),
    [
        (LLAMA_31_8B, 1, 131_072),  # 2 x 32 layers x 8 heads x 128 x 2 bytes
        (LLAMA_31_8B, 2, 65_536),
        (LLAMA_31_70B, 8, 40_960),  # one head a shard
        (LLAMA_31_70B, 16, 40_960),  # fewer heads than shards: each head twice
        (LLAMA_2_7B, 1, 524_288),  # every attention head has its K and V
        (QWEN_3_32B, 4, 65_536),  # head_dim is not hidden_size / heads
        (QWEN_25_05B, 2, 6_144),
        (DEEPSEEK_V3, 1, 70_272),  # one latent of 576 a token and layer, no V
        (DEEPSEEK_V3, 8, 70_272),  # the same on every shard
    ],
)
def test_bytes_per_block_match_real_models(config: dict[str, Any], shards: int, bytes_per_token: int) -> None:
    """A block of 16 tokens takes what the model's heads, layers and dtype come to, on one shard."""
    layout = layout_from_model_config(config, block_size=16, shards=shards)

    assert layout.bytes_per_block() == 16 * bytes_per_token
    assert layout.blocks_per_budget(10**9) == 10**9 // (16 * bytes_per_token)
    assert layout.pool_bytes(layout.blocks_per_budget(10**9)) <= 10**9


def test_latent_attention_has_no_v_and_is_replicated() -> None:
    """MLA keeps one K-shaped latent per token, the same on every shard, and no V."""
    (group,) = layout_from_model_config(DEEPSEEK_V3, block_size=64, shards=8).groups

    assert (group.kv_heads, group.head_dim, group.v_head_dim, group.replicated) == (1, 576, 0, True)
    assert group.v_bytes(64) == 0


def test_cache_dtype_and_scales_count() -> None:
    """A cache of another dtype takes its own size, and scales lie inside the block's bytes."""
    half = layout_from_model_config(LLAMA_31_8B, block_size=16, shards=1, kv_dtype="float8_e4m3fn")
    scaled = Layout(
        block_size=16,
        shards=1,
        groups=(KvGroup(layers=32, kv_heads=8, head_dim=128, v_head_dim=128, dtype="int8", scale_bytes=1024),),
    )

    assert half.bytes_per_block() == 16 * 65_536
    assert scaled.bytes_per_block() == 16 * 65_536 + 32 * 1024


def test_groups_add_up() -> None:
    """A block is all groups' layers together."""
    full = KvGroup(layers=2, kv_heads=2, head_dim=8, v_head_dim=8, dtype="float32")
    latent = KvGroup(layers=3, kv_heads=1, head_dim=24, v_head_dim=0, dtype="bfloat16")
    layout = Layout(block_size=4, shards=1, groups=(full, latent))

    assert layout.bytes_per_block() == 2 * (4 * 2 * 8 * 4 * 2) + 3 * (4 * 24 * 2)


@given(
    order=st.sampled_from(["block_first", "layer_first"]),
    slots=st.integers(1, 5),
    layers=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    scale_bytes=st.integers(0, 7),
)
def test_pages_tile_the_pool(order: Any, slots: int, layers: list[int], scale_bytes: int) -> None:
    """In either order, the pages of all groups, layers and slots cover every byte of the pool exactly once."""
    groups = tuple(
        KvGroup(layers=count, kv_heads=1, head_dim=2 + index, v_head_dim=index, dtype="int8", scale_bytes=scale_bytes)
        for index, count in enumerate(layers)
    )
    layout = Layout(block_size=2, shards=1, groups=groups, order=order)
    covered = [0] * layout.pool_bytes(slots)
    for group_index, group in enumerate(groups):
        for layer in range(group.layers):
            for slot in range(slots):
                first = layout.page_offset(slots, group_index, layer) + slot * layout.slot_stride_bytes(group_index)
                for byte in range(first, first + group.page_bytes(2)):
                    covered[byte] += 1

    assert set(covered) == {1}


@pytest.mark.parametrize("field", ["layers", "kv_heads", "head_dim", "v_head_dim", "dtype", "scale_bytes"])
def test_fingerprint_tells_layouts_apart(field: str) -> None:
    """Layouts share a fingerprint only if every size, dtype and order is the same."""
    sizes: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 8, "v_head_dim": 8, "dtype": "int8"}
    other = {**sizes, field: "uint8" if field == "dtype" else 9}
    first = Layout(block_size=4, shards=1, groups=(KvGroup(**sizes),))

    assert first.fingerprint() == Layout(block_size=4, shards=1, groups=(KvGroup(**sizes),)).fingerprint()
    assert first.fingerprint() != Layout(block_size=4, shards=1, groups=(KvGroup(**other),)).fingerprint()
    for changed in (
        Layout(block_size=8, shards=1, groups=first.groups),
        Layout(block_size=4, shards=2, groups=first.groups),
        Layout(block_size=4, shards=1, groups=first.groups, order="block_first"),
        Layout(block_size=4, shards=1, groups=(*first.groups, *first.groups)),
    ):
        assert changed.fingerprint() != first.fingerprint()
        of_blocks = changed.block_fingerprint() != first.block_fingerprint()
        assert of_blocks == (changed.order == first.order)  # outside pools, the order of their pages does not matter


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        ({"num_key_value_heads": 6}, "do not divide"),
        ({"torch_dtype": "complex64"}, "'complex64'"),
        ({"torch_dtype": ["bfloat16"]}, "dtype"),
        ({"num_key_value_heads": -8}, "num_key_value_heads is -8"),
        ({"num_key_value_heads": [3, 4]}, r"num_key_value_heads is \[3, 4\]"),
        ({"head_dim": 64.0}, "head_dim is 64.0"),
        ({"head_dim": "64"}, "head_dim is '64'"),
        ({"v_head_dim": 0}, "v_head_dim is 0"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "kinds of layers are groups"),
        ({"layer_types": [["full_attention"]]}, "kinds of layers are groups"),
        ({"layer_types": "full_attention"}, "kinds of layers are groups"),
        ({"layer_types": 32}, "kinds of layers are groups"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),  # Mistral 7B v0.1, Gemma 2
        ({"attn_layer_period": 8, "attn_layer_offset": 4}, "attn_layer_period is 8"),  # Jamba
        ({"layers_block_type": ["recurrent", "attention"]}, "layers_block_type"),  # Zamba 2
        ({"block_types": ["recurrent", "recurrent", "attention"]}, "block_types"),  # RecurrentGemma
        ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern"),  # Nemotron-H
        ({"full_attention_interval": 4}, "full_attention_interval"),  # Qwen3-Next
        ({"attention_chunk_size": 8192}, "attention_chunk_size"),  # Llama 4
        ({"multi_query": True}, "multi_query is True"),  # Falcon 7B
        ({"index_head_dim": 128}, "index_head_dim"),  # DeepSeek V3.2
        ({"linear_attn_config": {"kda_layers": [1, 2, 3]}}, "linear_attn_config"),  # Kimi Linear
        ({"layer_group_size": 5}, "layer_group_size"),  # Ring-mini-linear
        ({"use_cla": True}, "use_cla"),  # Hunyuan-Large
        ({"cross_attention_layers": [3, 8]}, "cross_attention_layers"),  # Llama 3.2 Vision
    ],
)
def test_unusable_model_configs_are_refused_with_the_reason(change: dict[str, Any], words: str) -> None:
    """A config that shapes no uniform cache is refused, and the message names the field."""
    with pytest.raises(RequestError, match=words):
        layout_from_model_config({**LLAMA_31_8B, **change}, block_size=16, shards=4)


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["full_attention"] * 32, "sliding_window": 4096},
        {"sliding_window": 131_072, "use_sliding_window": False},  # Qwen 2.5
        {"sliding_window": 262_144, "max_position_embeddings": 131_072},  # Phi-3.5-mini
        {"sliding_window": None, "multi_query": False, "is_encoder_decoder": False, "head_dim": None},
    ],
)
def test_fields_that_say_nothing_of_a_model_are_passed_over(change: dict[str, Any]) -> None:
    """A field that is off, or that others overrule, refuses no model."""
    plain = layout_from_model_config(LLAMA_31_8B, block_size=16, shards=4)
    assert layout_from_model_config({**LLAMA_31_8B, **change}, block_size=16, shards=4) == plain


def test_v_may_have_another_size_than_k() -> None:
    """As in models with `v_head_dim` beside `head_dim`."""
    config = {**LLAMA_31_8B, "head_dim": 192, "v_head_dim": 128}
    (group,) = layout_from_model_config(config, block_size=16, shards=4).groups
    assert (group.head_dim, group.v_head_dim) == (192, 128)


#: The fields that are read.
FIELDS = (*LLAMA_31_8B, "head_dim", "v_head_dim", "layer_types", "kv_lora_rank", "qk_rope_head_dim", "text_config")
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=3,
)


@given(changes=st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=3))
def test_no_value_of_a_model_config_raises_anything_else(changes: dict[str, Any]) -> None:
    """Whatever JSON stands in a field: a layout with whole numbers, or a refusal."""
    with suppress(RequestError):
        layout = layout_from_model_config({**LLAMA_31_8B, **changes}, block_size=16, shards=1)
        assert isinstance(layout.bytes_per_block(), int)


@pytest.mark.parametrize("sizes", [{"layers": 0}, {"kv_heads": -1}, {"scale_bytes": -1}, {"head_dim": 1 << 60}])
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    """Sizes that are not positive, or that no pool can hold, are refused."""
    group = KvGroup(**{"layers": 1, "kv_heads": 1, "head_dim": 1, "v_head_dim": 1, "dtype": "int8", **sizes})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="layout: "):
        Layout(block_size=1, shards=1, groups=(group,)).check()
