"""vLLM's configuration, as far as the connector reads it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def vllm_config(**changes: Any) -> Any:
    """A configuration that the connector takes; `changes` by dotted path, with `__` for the dot."""
    model = SimpleNamespace(
        model="acme/llama",
        architecture="LlamaForCausalLM",
        revision=None,
        code_revision=None,
        dtype="torch.float32",
        quantization=None,
        quantization_config=None,
        seed=0,
        max_model_len=1024,
        use_mla=False,
        is_diffusion=False,
        is_prefix_caching_supported=True,
        enable_sleep_mode=False,
        multimodal_config=None,
        model_class_overrides={},
        get_total_num_kv_heads=lambda: 2,
        hf_config=SimpleNamespace(config={"hidden_size": 128, "_name_or_path": "acme/llama"}),
    )
    model.hf_config.to_dict = lambda: dict(model.hf_config.config)
    model.hf_text_config = model.hf_config
    config = SimpleNamespace(
        model_config=model,
        load_config=SimpleNamespace(load_format="auto", download_dir=None, model_loader_extra_config={}),
        cache_config=SimpleNamespace(
            block_size=32,
            enable_prefix_caching=True,
            cache_dtype="auto",
            kv_cache_dtype_skip_layers=[],
            prefix_caching_hash_algo="sha256",
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            nnodes=1,
            nnodes_within_dp=1,
            distributed_executor_backend="mp",
            enable_fault_tolerance=False,
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        scheduler_config=SimpleNamespace(policy="fcfs"),
        speculative_config=None,
        kv_transfer_config=SimpleNamespace(kv_role="kv_both", kv_load_failure_policy="recompute"),
    )
    for path, value in changes.items():
        *parents, name = path.split("__")
        place = config
        for parent in parents:
            place = getattr(place, parent)
        setattr(place, name, value)
    return config


def cache_config(groups: int = 1) -> Any:
    """Groups of layers."""
    return SimpleNamespace(kv_cache_groups=[object()] * groups, kv_cache_layout="LBHNC")
