"""vLLM's groups of layers: which of them the connector takes, and what they are for the keyspace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from kvcached_client.blocks.canonical import canonical_layout
from kvcached_client.blocks.host_layout import CanonicalLayout
from kvcached_client.blocks.pages import EnginePages
from kvcached_client.vllm.settings import KvCacheConfig, VllmConfig, VllmObject, canonical_heads

#: Whatever the order in memory, vLLM's tensor of a layer is [blocks, heads, tokens, content].
_HEAD_DIMENSION: Final = -3
#: Kinds of layers with attention to the whole prompt. A class that derives from one may be of another kind: RSWASpec.
_WHOLE: Final = (FullAttentionSpec, MLAAttentionSpec, SinkFullAttentionSpec)
#: Kinds of layers of several groups. Others keep other blocks than vLLM's lists say.
_KINDS: Final = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec)
#: How vLLM keeps states of which requests may continue.
_ALIGNED: Final = "align"


def keeps_all_blocks(spec: VllmObject, max_model_len: int) -> bool:
    """Whether vLLM keeps all blocks of a request for each layer of a group: no block leaves a sliding window."""
    return all(
        type(layer) in _WHOLE or (isinstance(layer, SlidingWindowSpec) and layer.sliding_window >= max_model_len)
        for layer in iter_layer_specs(spec)
    )


def looks_ahead(specs: Sequence[VllmObject]) -> bool:
    """Whether some layers of these groups attend to tokens behind a block's end, so that it depends on these."""
    return any(getattr(layer, "non_causal", False) for spec in specs for layer in iter_layer_specs(spec))


def has_states(spec: VllmObject) -> bool:
    """Whether the layers of a group keep states: of all tokens so far, instead of each."""
    return all(isinstance(layer, MambaSpec) for layer in iter_layer_specs(spec))


def check_groups(specs: Sequence[VllmObject]) -> None:
    """Refuse groups that are not of layers with attention, or with states that vLLM keeps beside such groups.

    Raises:
        ValueError: the reason.
    """
    layers = [layer for spec in specs for layer in iter_layer_specs(spec)]
    other = sorted({type(layer).__name__ for layer in layers if type(layer) not in _KINDS})
    reasons = {
        f"vLLM keeps {', '.join(other)} for groups of this model's layers; it takes groups with full attention, "
        "sliding windows, chunked local attention or states: use no kvcached": bool(other),
        "no layer of the model has attention, so that vLLM has states and no blocks: use no kvcached": all(
            has_states(spec) for spec in specs
        ),
        "vLLM keeps no states of which a request may continue: leave out --no-enable-prefix-caching, and "
        "--mamba-cache-mode": any(
            isinstance(layer, MambaSpec) and layer.mamba_cache_mode != _ALIGNED for layer in layers
        ),
    }
    if found := [reason for reason, is_so in reasons.items() if is_so]:
        raise ValueError("KvcachedHybridConnector cannot be used here:" + "".join(f"\n- {reason}" for reason in found))


def check_states(specs: Sequence[VllmObject], hash_tokens: int) -> None:
    """Refuse states that vLLM may name at a boundary that they never had.

    Where vLLM keeps a state in the middle of a step, a step that begins inside a block goes on behind the end of the
    block: vLLM 0.32 and 0.33 then take the state at its beginning for that at the block's end.

    Args:
        specs: of the groups.
        hash_tokens: tokens of one of vLLM's hashes.

    Raises:
        ValueError: what to do.
    """
    states = [layer for spec in specs for layer in iter_layer_specs(spec) if isinstance(layer, MambaSpec)]
    if any(layer.num_prefill_checkpoint_blocks and layer.block_size > hash_tokens for layer in states):
        size = max(layer.block_size for layer in states)
        raise ValueError(
            f"KvcachedHybridConnector cannot be used here:\n- vLLM finds prompts by {hash_tokens} tokens at a time, "
            f"and may then take the state inside a block of {size} for that at its end: leave out --prefix-match-unit, "
            "or use no kvcached"
        )


def canonical_of(pages: EnginePages, config: VllmConfig, cache: KvCacheConfig) -> CanonicalLayout | None:
    """The layout in which storage may hold blocks for any number of ranks; None if their bytes are not of heads alone.

    Several groups share pages, in which a group's layers lie otherwise than another's. Where vLLM counts slots of heads
    instead of heads, K, V and their scales have slots of their own. Pipeline stages have parts of the layers.
    """
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    layers = [layer for spec in specs for layer in iter_layer_specs(spec)]
    if (
        len(specs) > 1
        or config.parallel_config.pipeline_parallel_size > 1
        or any(isinstance(layer, MambaSpec) or getattr(layer, "num_head_slots", None) is not None for layer in layers)
    ):
        return None
    ranks = config.parallel_config.tensor_parallel_size
    return canonical_layout(pages, ranks, canonical_heads(config), _HEAD_DIMENSION)


def tensors_of(kv_caches: Mapping[str, VllmObject], config: VllmConfig) -> dict[str, VllmObject]:
    """VLLM's KV tensors by name: a layer with states may have several.

    Those of a pipeline stage have the number of their layer in the stage for a name, so that stages with as many and
    such layers have the same names.
    """
    if config.parallel_config.pipeline_parallel_size > 1:
        kv_caches = {f"layer {number} of the stage": caches for number, caches in enumerate(kv_caches.values())}
    tensors: dict[str, VllmObject] = {}
    for name, caches in kv_caches.items():
        if isinstance(caches, Sequence):
            tensors |= {f"{name} {number}": each for number, each in enumerate(caches)}
        else:
            tensors[name] = caches
    return tensors


def described(groups: Sequence[VllmObject]) -> list[list[object]]:
    """What tells these groups from others, in their order: the keys of blocks have the number of their group."""
    return [
        [[type(layer).__name__, str(layer)] for layer in iter_layer_specs(group.kv_cache_spec)]
        + [list(group.layer_names)]
        for group in groups
    ]
