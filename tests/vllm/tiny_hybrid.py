"""Writes a small model of a family whose caches are not all heads of all tokens, with random weights.

    python -m tests.vllm.tiny_hybrid FOLDER FAMILY [--window N]

FAMILY is one of:

- `deepseek`: latent attention: a layer keeps one vector of each token, from which all its heads are computed;
- `gemma3`: every other layer attends to a window of so many tokens;
- `gemma4`: likewise, and the other layers have heads twice as wide, so that vLLM's blocks hold half as many tokens;
- `mistral`: every layer attends to the window;
- `gpt_oss`: as `gemma3`, with attention sinks and experts. It has no weights: load it with random ones;
- `llama4`: every other layer attends to chunks of so many tokens;
- `lfm2`: two of three layers are short convolutions, which keep a state of so many last tokens;
- `qwen3_next`: three of four layers are gated delta nets, which keep two states of all tokens. Load it as bfloat16, for
  which alone vLLM has these layers on the CPU.

As of `tiny_model`, FOLDER gets `model`. Runs in the environment of vLLM, in the folder of the checkout.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from tests.vllm.tiny_model import TOKENIZER, TOKENIZER_CONFIG, VOCABULARY, Shape, model_weights, write

LAYER_TYPES = ("sliding_attention", "full_attention")


def deepseek(shape: Shape) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Those of a DeepSeek without experts, whose latent vectors are as long as DeepSeek's: kernels take no others."""
    plain = Shape(layers=shape.layers, heads=8)
    latent, turned, unturned, values = 512, 64, 128, 128
    config = plain.config() | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": plain.heads,
        "q_lora_rank": None,
        "kv_lora_rank": latent,
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": unturned,
        "v_head_dim": values,
        "first_k_dense_replace": plain.layers,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    del config["head_dim"], config["rope_theta"]
    sizes = {
        "q_proj": (plain.heads * (unturned + turned), plain.hidden),
        "kv_a_proj_with_mqa": (latent + turned, plain.hidden),
        "kv_b_proj": (plain.heads * (unturned + values), latent),
        "o_proj": (plain.hidden, plain.heads * values),
    }
    source = torch.Generator().manual_seed(4)
    weights = {name: each for name, each in model_weights(plain, 0).items() if ".self_attn." not in name}
    for prefix in (f"model.layers.{layer}.self_attn" for layer in range(plain.layers)):
        for name, size in sizes.items():
            weights[f"{prefix}.{name}.weight"] = torch.randn(size, generator=source) * size[1] ** -0.5 * 3
        weights[f"{prefix}.kv_a_layernorm.weight"] = torch.ones(latent)
    return config, weights


def gemma3(shape: Shape) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The configuration and the weights of a Gemma 3."""
    return shape.config(), model_weights(shape, 0)


def mistral(shape: Shape) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Those of a Mistral with a window in all layers."""
    plain = Shape(layers=shape.layers)
    names = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": shape.window}
    return plain.config() | names, model_weights(plain, 0)


def gemma4(shape: Shape) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Those of a Gemma 4 without the parts that have no cache."""
    config = shape.config() | {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "global_head_dim": 2 * shape.head_dim,
        "num_global_key_value_heads": shape.kv_heads,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCABULARY,
        "rope_parameters": {name: {"rope_type": "default", "rope_theta": 10_000.0} for name in LAYER_TYPES},
    }
    for name in ("rope_theta", "rope_local_base_freq", "query_pre_attn_scalar"):
        del config[name]
    weights = model_weights(shape, 0)
    wide = model_weights(Shape(shape.layers, shape.heads, shape.kv_heads, 2 * shape.head_dim, shape.window), 1)
    for name in list(weights):
        if "norm" in name:
            weights[name] = torch.ones_like(weights[name])  # Gemma 4 adds nothing to them
        if ".self_attn." in name and int(name.split(".")[2]) % 2:
            rows, columns = wide[name].shape if wide[name].dim() > 1 else (len(wide[name]), 0)
            inputs, outputs = min(columns, shape.hidden), rows
            if name.endswith("o_proj.weight"):
                inputs, outputs = columns, shape.hidden
            weights[name] = wide[name][:outputs, :inputs].contiguous() if columns else torch.ones(rows)
    return config, weights


def gpt_oss(shape: Shape) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The configuration of a gpt-oss, and no weights."""
    rope = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0}
    names = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "intermediate_size": shape.hidden,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": shape.window,
        "layer_types": [LAYER_TYPES[layer % 2] for layer in range(shape.layers)],
        "rope_parameters": rope | {"original_max_position_embeddings": 2048, "truncate": False},
    }
    return Shape(layers=shape.layers).config() | names, {}


def llama4(shape: Shape) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Those of a Llama 4 without experts."""
    plain = Shape(layers=shape.layers)
    names = {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "intermediate_size_mlp": plain.inner,
        "interleave_moe_layer_step": shape.layers + 1,
        "num_local_experts": 1,
        "no_rope_layers": [(layer + 1) % 2 for layer in range(shape.layers)],
        "attention_chunk_size": shape.window,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    weights = {name.replace(".mlp.", ".feed_forward."): each for name, each in model_weights(plain, 0).items()}
    return plain.config() | names, weights


def lfm2(shape: Shape) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Those of an LFM2, with two layers of short convolutions before each with attention."""
    plain = Shape(layers=6)
    kinds = [("conv", "conv", "full_attention")[layer % 3] for layer in range(plain.layers)]
    config = plain.config() | {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "layer_types": kinds,
        "conv_L_cache": shape.window,
        "conv_dim": plain.hidden,
        "block_dim": plain.hidden,
        "block_multiple_of": 1,
        "conv_bias": False,
        "norm_eps": 1e-5,
        "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    source = torch.Generator().manual_seed(2)
    weights = model_weights(plain, 0)
    del weights["lm_head.weight"]
    weights["model.embedding_norm.weight"] = weights.pop("model.norm.weight")
    renamed = {
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "self_attn.o_proj": "self_attn.out_proj",
    }
    for old, new in renamed.items():
        weights = {name.replace(old, new): each for name, each in weights.items()}
    for layer, kind in enumerate(kinds):
        prefix = f"model.layers.{layer}"
        if kind == "full_attention":
            norms = (f"{prefix}.self_attn.{name}_layernorm.weight" for name in "qk")
            weights |= {name: torch.ones(plain.head_dim) for name in norms}
            continue
        weights = {name: each for name, each in weights.items() if not name.startswith(f"{prefix}.self_attn.")}
        sizes = {"conv": (1, shape.window), "in_proj": (plain.hidden,), "out_proj": (plain.hidden,)}
        for name, size in sizes.items():
            rows = 3 * plain.hidden if name == "in_proj" else plain.hidden
            spread = 0.5 if name == "conv" else plain.hidden**-0.5  # gates multiply, so that large values explode
            weights[f"{prefix}.conv.{name}.weight"] = torch.randn(rows, *size, generator=source) * spread
    return config, weights


def qwen3_next(shape: Shape) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Those of a Qwen3-Next, as transformers makes them; vLLM's kernel takes heads of 128."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM  # takes seconds, and others do without  # noqa: PLC0415

    wide = Shape(layers=4, heads=2, kv_heads=1, head_dim=64)
    torch.manual_seed(3)
    config = Qwen3NextConfig(
        **{name: value for name, value in wide.config().items() if name not in {"architectures", "model_type"}},
        layer_types=[*["linear_attention"] * 3, LAYER_TYPES[1]],
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=shape.window,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=wide.hidden,
        shared_expert_intermediate_size=wide.hidden,
        initializer_range=wide.spread,
    )
    weights = {name: each.to(torch.bfloat16) for name, each in Qwen3NextForCausalLM(config).state_dict().items()}
    names = {"architectures": ["Qwen3NextForCausalLM"], "dtype": "bfloat16"}
    return config.to_dict() | names, weights


FAMILIES = {
    "deepseek": deepseek,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "gpt_oss": gpt_oss,
    "lfm2": lfm2,
    "llama4": llama4,
    "mistral": mistral,
    "qwen3_next": qwen3_next,
}


def main() -> None:
    """Write the model."""
    parser = argparse.ArgumentParser(description="a small model with several kinds of caches")
    parser.add_argument("folder", type=Path)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--window", type=int, default=64)
    arguments = parser.parse_args()
    config, weights = FAMILIES[arguments.family](Shape(layers=4, window=arguments.window))
    documents = {"config.json": config, "tokenizer.json": TOKENIZER, "tokenizer_config.json": TOKENIZER_CONFIG}
    write(arguments.folder / "model", weights, "model.safetensors", documents)


if __name__ == "__main__":
    main()
