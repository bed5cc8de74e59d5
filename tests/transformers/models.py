"""Small models with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

VOCABULARY = 64


def llama(seed: int = 0, *, dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    """A Llama of two layers; equal arguments make equal weights. It never ends a text by itself."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **sizes,
    }
    config = LlamaConfig(max_position_embeddings=4096, eos_token_id=None, **shape)
    model: Any = LlamaForCausalLM(config)
    return model.to(dtype).eval()


def mistral() -> Any:
    """A Mistral with sliding windows."""
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=16,
    )
    model: Any = MistralForCausalLM(config)
    return model.eval()


def tokens(count: int, seed: int = 1) -> torch.Tensor:
    """A prompt, the same for the same arguments."""
    return torch.randint(3, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))
