"""vLLM's groups of layers: which of them the connector takes, and what they are for the keyspace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

#: vLLM is untyped here.
VllmObject: TypeAlias = Any

#: Kinds of layers of several groups. Others keep states instead of blocks, or other blocks than vLLM's lists say.
_KINDS: Final = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)


def keeps_all_blocks(spec: VllmObject, max_model_len: int) -> bool:
    """Whether vLLM keeps all blocks of a request for each layer of a group: no block leaves a sliding window."""
    return all(
        isinstance(layer, FullAttentionSpec)
        or (isinstance(layer, SlidingWindowSpec) and layer.sliding_window >= max_model_len)
        for layer in iter_layer_specs(spec)
    )


def check_groups(specs: Sequence[VllmObject]) -> None:
    """Refuse groups that are not of layers with full attention, sliding windows or chunks.

    Raises:
        ValueError: a group is of another kind.
    """
    kinds = {type(layer) for spec in specs for layer in iter_layer_specs(spec)}
    if other := sorted(kind.__name__ for kind in kinds.difference(_KINDS)):
        raise ValueError(
            f"KvcachedHybridConnector cannot be used here: vLLM keeps {', '.join(other)} for groups of this model's "
            "layers; it takes groups with full attention, sliding windows or chunked local attention: use no kvcached"
        )


def described(groups: Sequence[VllmObject]) -> list[list[object]]:
    """What tells these groups from others, in their order: the keys of blocks have the number of their group."""
    return [
        [[type(layer).__name__, str(layer)] for layer in iter_layer_specs(group.kv_cache_spec)]
        + [list(group.layer_names)]
        for group in groups
    ]
