"""What SGLang computes keys and values with, beside the model: some of its settings, and environment variables.

Most settings and variables say how fast SGLang is. These say what comes out: which tokens attention leaves out, what is
capped, with how many bits weights and activations are multiplied, or what the model sees of a picture. For
SGLang, a picture is what its processor puts out, but not with every model, and not where a request names the picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

#: SGLang is untyped here.
SglangObject: TypeAlias = Any

#: Settings by SGLang's groups of them.
_SETTINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "features": ("enable_tf32_matmul",),
    "kernel": (
        "fp4_gemm_runner_backend",
        "fp8_gemm_runner_backend",
        "triton_attention_reduce_in_fp32",
        "prefill_kv_cache_dequant_dtype",
        "dsa_prefill_backend",
        "dsa_decode_backend",
        "dsa_topk_backend",
        "enable_precise_embedding_interpolation",
    ),
    "comm": ("enable_quant_communications",),
    "deterministic": ("enable_deterministic_inference", "rl_on_policy_target"),
    "dllm": ("dllm_algorithm", "dllm_algorithm_config"),
}
#: Those of pictures and other media.
_MEDIA: Final = (
    "mm_process_config",
    "image_processor_backend",
    "disable_fast_image_processor",
    "mm_attention_backend",
)
_BACKENDS: Final = ("prefill_attention_backend", "decode_attention_backend")
#: Values that mean the same as no such setting. What SGLang chooses itself stands in their place where it matters.
_NOT_SET: Final[tuple[object, ...]] = (None, False, "", "auto", {})
_ENVIRONMENT: Final = (
    # which model, and which parts of it
    "SGLANG_DISABLED_MODEL_ARCHS",
    "SGLANG_EXTERNAL_MM_MODEL_ARCH",
    "SGLANG_EXTERNAL_MODEL_PACKAGE",
    "SGLANG_GEMMA_OUT_OF_PLACE_POSITION_MUTATION",
    "SGLANG_MINICPM_DENSE_AS_SPARSE",
    "SGLANG_MINICPM_FORCE_DENSE",
    "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS",
    "SGLANG_SIMULATE_UNIFORM_EXPERTS",
    # what attention leaves out, and with how many bits it computes
    "SGLANG_DISABLE_M3_FP8_ATTN_GEMM",
    "SGLANG_DISABLE_MSA_V1_Q8KV4",
    "SGLANG_DSA_HIP_DISABLE_PRESHUFFLE",
    "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD",
    "SGLANG_MINIMAX_M3_INDEX_TOPK_FREQ",
    "SGLANG_OPT_MINIMAX_M3_FP8_INDEX_CACHE",
    "SGLANG_ROPE_CACHE_FP32",
    "SGLANG_SKIP_SOFTMAX_DECODE_THRESHOLD_SCALE_FACTOR",
    "SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR",
    "SGLANG_TRITON_FP8_PREFILL_ATTN",
    # how weights are quantized
    "FLASHINFER_NVFP4_4OVER6",
    "FLASHINFER_NVFP4_4OVER6_E4M3_USE_256",
    "SGLANG_CPU_QUANTIZATION",
    "SGLANG_FORCE_FP8_MARLIN",
    "SGLANG_FORCE_MXFP8_BLOCK_CONVERT",
    "SGLANG_FORCE_MXFP8_BLOCK_CONVERT_DENSE",
    "SGLANG_FP4_IGNORED_LAYERS",
    "SGLANG_FP8_IGNORED_LAYERS",
    "SGLANG_HUMMING_ONLINE_QUANT_CONFIG",
    "SGLANG_INT4_WEIGHT",
    "SGLANG_NPU_ARCH35_REQUANT_BLOCK_FP8",
    "SGLANG_NPU_W4A4_NEW_PACKING",
    "SGLANG_NVFP4_CKPT_FP8_GEMM_IN_ATTN",
    "SGLANG_OPT_HOPPER_BLOCK_FP8_BF16",
    "SGLANG_ROCM_DISABLE_LINEARQUANT",
    # how activations are quantized, also on their way to other devices
    "DEEP_NORMAL_MODE_USE_INT8_QUANT",
    "SGLANG_AMD_FLYDSL_MEGA_QUANT",
    "SGLANG_DEEPEP_BF16_DISPATCH",
    "SGLANG_ENABLE_DP_GATHER_FP8",
    "SGLANG_FLASHINFER_CUTEDSL_NVFP4_W4A16",
    "SGLANG_FLASHINFER_MEGAMOE_COMBINE_DTYPE",
    "SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION",
    "SGLANG_HUMMING_INPUT_QUANT_CONFIG",
    "SGLANG_HUMMING_USE_F16_ACCUM",
    "SGLANG_MOE_NVFP4_DISPATCH",
    "SGLANG_MORI_COMBINE_DTYPE",
    "SGLANG_MORI_DISPATCH_DTYPE",
    "SGLANG_NIXL_EP_BF16_DISPATCH",
    "SGLANG_USE_AITER_FP8_PER_TOKEN",
    # what the model sees of a picture or a video
    "SGLANG_ENCODER_IMAGE_PROCESSOR_USE_GPU",
    "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE",
    "SGLANG_FORCE_CPU_IMAGE_PREPROCESSING",
    "SGLANG_IMAGE_MAX_PIXELS",
    "SGLANG_INKLING_RS_MM_PREPROCESS",
    "SGLANG_RESIZE_RESAMPLE",
    "VIDEO_MAX_PIXELS",
    "XHS_VIDEO_JPEG_QUALITY",
)


def computed_with(execution: SglangObject, media: SglangObject, environment: Mapping[str, str]) -> dict[str, object]:
    """What is set, by name. An attention backend is, also if SGLang chose it: they differ in what they leave out.

    Args:
        execution: SGLang's settings of how it computes.
        media: those of pictures and other media.
        environment: variables of the process.
    """
    groups = {group: getattr(execution, group, None) for group in _SETTINGS}
    said = {name: getattr(groups[group], name, None) for group, names in _SETTINGS.items() for name in names}
    base = getattr(groups["kernel"], "attention_backend", None)
    said |= {name: getattr(groups["kernel"], name, None) or base for name in _BACKENDS}
    said |= {name: getattr(media, name, None) for name in _MEDIA}
    said |= {name: environment.get(name) for name in _ENVIRONMENT}
    return {name: value for name, value in said.items() if value not in _NOT_SET}
