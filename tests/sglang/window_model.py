"""Writes a small model with random weights whose layers have a sliding window or none. Nothing is downloaded.

    python tests/sglang/window_model.py FOLDER

SGLang gives the layers with a window a pool of their own. It is a Beam without experts: of the models of which SGLang
does that, one that needs no GPU. FOLDER gets `model`. Runs in SGLang's environment.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCABULARY, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 512, 128, 256, 4, 2, 32, 4
WINDOW_TOKENS = 64
CONFIG = {
    "architectures": ["BeamForCausalLM"],
    "model_type": "beam",
    "dtype": "float32",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 4096,
    "sliding_window": WINDOW_TOKENS,
    "layer_types": [("sliding_attention", "full_attention")[layer % 2] for layer in range(LAYERS)],
    "mlp_layer_types": ["dense"] * LAYERS,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")


def weights() -> dict[str, torch.Tensor]:
    """The weights, by the names that SGLang looks for."""
    source = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=source) * 0.3 * math.sqrt(128 / columns)

    made = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS), ("gate", HEADS)):
            made[f"{prefix}.self_attn.{name}_proj.weight"] = matrix(heads * HEAD_DIM, HIDDEN)
        made[f"{prefix}.self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
        made[f"{prefix}.self_attn.gate_bias"] = torch.zeros(HEADS)
        for name in ("gate", "up"):
            made[f"{prefix}.mlp.{name}_proj.weight"] = matrix(INNER, HIDDEN)
        made[f"{prefix}.mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
        for name in ("q", "k"):
            made[f"{prefix}.self_attn.{name}_norm.weight"] = torch.ones(HEAD_DIM)
        for name in _NORMS:
            made[f"{prefix}.{name}_layernorm.weight"] = torch.ones(HIDDEN)
    return made


def main(folder: Path) -> None:
    """Write it."""
    model = folder / "model"
    model.mkdir(parents=True)
    save_file(weights(), model / "model.safetensors", metadata={"format": "pt"})
    (model / "config.json").write_text(json.dumps(CONFIG, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
