"""Writes a small model with random weights, and LoRA adapters for it, as vLLM loads them. Nothing is downloaded.

    python tests/vllm/tiny_model.py FOLDER [--seed N] [--layers N] [--heads N] [--kv-heads N] [--head-dim N]
        [--window N]

With a window it is a Gemma 3, in which every other layer attends to so many tokens only.

The same seed and shape give the same bytes. FOLDER gets `model` and `adapters/one`, `adapters/two`. Runs in vLLM's
environment. Without options the model is tiny.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCABULARY = 512
CONTEXT_TOKENS = 4096
LORA_RANK = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """What the model is like, with the words of its configuration."""

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    window: int = 0

    @property
    def hidden(self) -> int:
        """Width of the model."""
        return self.heads * self.head_dim

    @property
    def inner(self) -> int:
        """Width of the feed-forward part."""
        return 2 * self.hidden

    @property
    def spread(self) -> float:
        """Standard deviation of weights, wide enough that one token wins clearly: with the usual 0.02 none would."""
        return 0.3 * math.sqrt(128 / self.hidden)

    def projections(self) -> dict[str, tuple[int, int]]:
        """Weight matrices of a layer: name to (outputs, inputs)."""
        keys_and_values = self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (self.hidden, self.hidden),
            "self_attn.k_proj": (keys_and_values, self.hidden),
            "self_attn.v_proj": (keys_and_values, self.hidden),
            "self_attn.o_proj": (self.hidden, self.hidden),
            "mlp.gate_proj": (self.inner, self.hidden),
            "mlp.up_proj": (self.inner, self.hidden),
            "mlp.down_proj": (self.hidden, self.inner),
        }

    def norms(self) -> dict[str, int]:
        """Normalisations of a layer: name to width."""
        names = ["input_layernorm", "post_attention_layernorm"]
        if not self.window:
            return dict.fromkeys(names, self.hidden)
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        heads = dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), self.head_dim)
        return dict.fromkeys(names, self.hidden) | heads

    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        return self._llama() | (self._windows() if self.window else {})

    def _windows(self) -> dict[str, Any]:
        """What a Gemma 3 says beside that, or otherwise."""
        return {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": [("sliding_attention", "full_attention")[layer % 2] for layer in range(self.layers)],
            "query_pre_attn_scalar": self.head_dim,
            "rope_local_base_freq": 10_000.0,
            "sliding_window": self.window,
            "tie_word_embeddings": True,
        }

    def _llama(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "vocab_size": VOCABULARY,
            "max_position_embeddings": CONTEXT_TOKENS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


#: One word per token, "w17" for 17: the servers are given token ids, and need a tokenizer only to start.
WORDS = ["<pad>", "<s>", "</s>", *(f"w{token}" for token in range(3, VOCABULARY))]
TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {
            "id": token,
            "content": word,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token, word in enumerate(WORDS[:3])
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {word: token for token, word in enumerate(WORDS)}, "unk_token": "<pad>"},
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": "<pad>",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "model_max_length": CONTEXT_TOKENS,
}
ADAPTER = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": LORA_RANK,
    "lora_alpha": 2 * LORA_RANK,
    "target_modules": ["q_proj", "v_proj"],
    "bias": "none",
    "base_model_name_or_path": "tiny",
}


def model_weights(shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    """The weights, by the names that vLLM looks for."""
    source = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=source) * shape.spread

    gain = 0.0 if shape.window else 1.0  # Gemma adds one
    weights = {
        "model.embed_tokens.weight": matrix(VOCABULARY, shape.hidden),
        "lm_head.weight": matrix(VOCABULARY, shape.hidden),
        "model.norm.weight": torch.full((shape.hidden,), gain),
    }
    if shape.window:
        del weights["lm_head.weight"]  # the embeddings are used instead
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        weights |= {f"{prefix}.{name}.weight": matrix(*size) for name, size in shape.projections().items()}
        weights |= {f"{prefix}.{name}.weight": torch.full((width,), gain) for name, width in shape.norms().items()}
    return weights


def adapter_weights(shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    """An adapter of the query and value projections that changes what comes out."""
    source = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(shape.layers):
        for name in ("q_proj", "v_proj"):
            rows, columns = shape.projections()[f"self_attn.{name}"]
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(LORA_RANK, columns, generator=source) * shape.spread
            weights[f"{prefix}.lora_B.weight"] = torch.randn(rows, LORA_RANK, generator=source) * shape.spread
    return weights


def write(folder: Path, weights: dict[str, torch.Tensor], file: str, documents: Mapping[str, object]) -> None:
    """Write a folder of weights and JSON documents."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / file, metadata={"format": "pt"})
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=1))


def main() -> None:
    """Write everything."""
    parser = argparse.ArgumentParser(description="a small model with random weights, and adapters")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    for name in Shape.__slots__:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Shape(), name))
    arguments = parser.parse_args()
    shape = Shape(**{name: getattr(arguments, name) for name in Shape.__slots__})
    documents = {"config.json": shape.config(), "tokenizer.json": TOKENIZER, "tokenizer_config.json": TOKENIZER_CONFIG}
    write(arguments.folder / "model", model_weights(shape, arguments.seed), "model.safetensors", documents)
    for number, name in enumerate(("one", "two"), start=1):
        weights = adapter_weights(shape, arguments.seed + number)
        folder = arguments.folder / "adapters" / name
        write(folder, weights, "adapter_model.safetensors", {"adapter_config.json": ADAPTER})


if __name__ == "__main__":
    main()
