"""The cache that `generate` is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache


class LoadedCache(DynamicCache):
    """A `DynamicCache` that refuses assisted generation.

    It computes the whole prompt again behind the tokens that a cache holds already, as of transformers 5.24, and gives
    another output.
    """

    @property
    def is_croppable(self) -> bool:
        """So that `generate` does not record the past for anything else than assisted generation."""
        return False

    def activate_past_recording(self) -> NoReturn:
        """Assisted generation begins.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "assisted generation (assistant_model, prompt_lookup_num_tokens and the like) computes a prompt again that "
            "its cache holds already, and gives another output: leave these options out, or let generate make its "
            "cache by itself"
        )


def cache_of(config: PreTrainedConfig, chunks: Sequence[Sequence[torch.Tensor]]) -> LoadedCache:
    """A cache that holds what was taken in chunks, one after the other; an empty one where there are none."""
    cache = LoadedCache(config=config)
    with torch.inference_mode(mode=False):
        tensors = [torch.cat(parts, dim=2) for parts in zip(*chunks, strict=True)]
        for layer, (keys, values) in enumerate(zip(tensors[::2], tensors[1::2], strict=True)):
            cache.update(keys, values, layer)
    return cache
