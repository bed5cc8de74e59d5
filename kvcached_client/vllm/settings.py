"""kvcached's settings in vLLM's configuration, and the configurations that kvcached does not support."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

#: The first supported minor version, and the first unsupported one.
SUPPORTED_FROM: Final = (0, 32)
SUPPORTED_BELOW: Final = (0, 34)

#: In the names of numbers of KV heads, such as `swa_num_key_value_heads`.
_KV_HEADS: Final = re.compile("(key_value|kv)_heads")
#: What vLLM reads for all layers, or passes over: models whose query heads share one may have any number there.
_KV_HEADS_OF_ALL: Final = frozenset({"num_key_value_heads", "num_kv_heads"})
#: How names begin of numbers of heads of layers that are not in the blocks.
_OF_OTHER_LAYERS: Final = ("cross_", "encoder_")

_RELEASE: Final = re.compile(r"(\d+)\.(\d+)(?:\D|$)")


def minor_version(version: str) -> tuple[int, int] | None:
    """Major and minor number of a version such as ``0.32.1+cpu``; None if it has none, as ``dev``."""
    found = _RELEASE.match(version)
    return (int(found[1]), int(found[2])) if found else None


def check_version(version: str) -> bool:
    """Refuse a version of vLLM that is too old, or has no number.

    Returns:
        Whether the connector supports the version as it is. A newer one may be used if `check_interface` passes.

    Raises:
        RuntimeError: `version` is older than the supported versions, or cannot be parsed.
    """
    if (found := minor_version(version)) is None or found < SUPPORTED_FROM:
        wanted = f">={_text(SUPPORTED_FROM)},<{_text(SUPPORTED_BELOW)}"
        raise RuntimeError(
            f"this vLLM is version {version}, KvcachedConnector supports {wanted}: install a kvcached-client that "
            f"supports it, or vllm{wanted}"
        )
    return found < SUPPORTED_BELOW


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


#: How long requests wait for storage: as long as the daemon is configured to, not at all, or until every block has
#: come; "off" does not use storage.
PrefetchMode: TypeAlias = Literal["timeout", "best_effort", "wait_complete", "off"]

#: What vLLM's resets of external caches do to the namespace.
OnReset: TypeAlias = Literal["clear", "keep"]

#: Whose memory vLLM's KV cache is in.
DeviceMemory: TypeAlias = Literal["engine", "daemon"]

#: Who copies blocks of tensors on a CUDA device.
Copies: TypeAlias = Literal["process", "thread"]

#: vLLM is untyped here.
VllmConfig: TypeAlias = Any
KvCacheConfig: TypeAlias = Any
VllmObject: TypeAlias = Any

#: How long a thread may keep the interpreter lock while others wait for it. vLLM's main threads spin while they wait
#: for each other; with Python's default of 5 ms, the daemon's thread and the copying thread would wait that long.
SWITCH_INTERVAL_S: Final = 0.0005

HOLD_DEADLINE_MS: Final = 1000
_HOLD_DEADLINE_MS_MAX: Final = 60_000
_KEYS: Final = ("copies", "device_memory", "hold_deadline_ms", "on_reset", "prefetch", "run_dir", "weights_version")
#: Of `kv_role`.
_LOADS_AND_STORES: Final = "kv_both"
_LOADS: Final = "kv_consumer"
_DEVICE_TYPES: Final = ("cpu", "cuda")
_CHOICES: Final = {"copies": Copies, "device_memory": DeviceMemory, "on_reset": OnReset, "prefetch": PrefetchMode}


@dataclass(frozen=True, slots=True)
class Settings:
    """The keys of ``kv_connector_extra_config``.

    Attributes:
        run_dir: directory of the daemon's sockets; None = `default_run_dir`.
        weights_version: a string to change when weights change without a change of their files.
        hold_deadline_ms: how long a request waits for the daemon before it is computed without external cache.
        prefetch: how long a request waits for blocks from the daemon's storage.
        device_memory: whose memory vLLM's KV cache is in; what is in the daemon's outlives this vLLM.
        read_only: only load blocks, and map the host pool to read it: vLLM's role ``kv_consumer``.
        copies: who copies blocks of tensors on a CUDA device: a process of its own, or a thread of the worker.
        on_reset: whether the namespace is cleared when vLLM resets external caches, as it also does to pause or sleep.
    """

    run_dir: str | None = None
    weights_version: str = ""
    hold_deadline_ms: int = HOLD_DEADLINE_MS
    prefetch: PrefetchMode = "timeout"
    device_memory: DeviceMemory = "engine"
    copies: Copies = "process"
    on_reset: OnReset = "clear"
    read_only: bool = False


def read_settings(extra: Mapping[str, object], kv_role: str = _LOADS_AND_STORES) -> Settings:
    """The settings in ``kv_connector_extra_config``, and what ``kv_role`` says.

    Raises:
        ValueError: an unknown key, or a value of the wrong kind.
    """
    unknown = sorted(set(extra) - set(_KEYS))
    if unknown:
        raise ValueError(
            f"kv_connector_extra_config: {', '.join(unknown)} unknown to KvcachedConnector; it knows {', '.join(_KEYS)}"
        )
    run_dir = extra.get("run_dir")
    version = extra.get("weights_version", "")
    deadline = extra.get("hold_deadline_ms", HOLD_DEADLINE_MS)
    if not (run_dir is None or (isinstance(run_dir, str) and run_dir)):
        raise ValueError(f"kv_connector_extra_config: run_dir is {run_dir!r}; give the daemon's run directory")
    if not isinstance(version, str):
        raise ValueError(f"kv_connector_extra_config: weights_version is {version!r}; give a string")  # noqa: TRY004
    if not isinstance(deadline, int) or isinstance(deadline, bool) or not 0 < deadline <= _HOLD_DEADLINE_MS_MAX:
        raise ValueError(
            f"kv_connector_extra_config: hold_deadline_ms is {deadline!r}; give 1 to {_HOLD_DEADLINE_MS_MAX}"
        )
    for key, choice in _CHOICES.items():
        if key in extra and extra[key] not in get_args(choice):
            raise ValueError(
                f"kv_connector_extra_config: {key} is {extra[key]!r}; give one of {', '.join(get_args(choice))}"
            )
    choices: Any = {key: extra[key] for key in _CHOICES if key in extra}
    return Settings(run_dir, version, deadline, read_only=kv_role == _LOADS, **choices)


def check_config(
    config: VllmConfig,
    cache: KvCacheConfig,
    *,
    keeps_all_blocks: bool,
    looks_ahead: bool = False,
    takes_groups: bool = False,
    tells_of_sleep: bool = False,
) -> None:
    """Refuse configurations that the connector cannot serve, or would serve wrongly.

    Args:
        config: vLLM's configuration.
        cache: vLLM's groups of layers.
        keeps_all_blocks: whether there is one group of layers, of which vLLM keeps all blocks of a request.
        looks_ahead: whether some layers attend to tokens behind a block's end.
        takes_groups: whether the connector takes other groups, too.
        tells_of_sleep: whether vLLM tells workers before it takes away the memory of its KV cache to sleep.

    Raises:
        ValueError: all reasons, each with what to do.
    """
    transfer, parallel, model = config.kv_transfer_config, config.parallel_config, config.model_config
    groups, device = cache.kv_cache_groups, config.device_config.device_type
    is_single = len(groups) == 1
    reasons = {
        f"kv_role is {transfer.kv_role!r}: set it to {_LOADS_AND_STORES!r}, or to {_LOADS!r} to store "
        "nothing": transfer.kv_role not in {_LOADS_AND_STORES, _LOADS},
        f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}, and would fail requests whose cached blocks "
        "are gone: set it to 'recompute'": transfer.kv_load_failure_policy != "recompute",
        "context parallelism splits a block's tokens over ranks: set decode_context_parallel_size and "
        "prefill_context_parallel_size to 1": max(
            parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
        )
        > 1,
        f"an engine's workers on {parallel.nnodes_within_dp} nodes cannot map one host pool: run it on one node; of "
        "--data-parallel-size, each rank is an engine": parallel.nnodes_within_dp > 1,
        "with external_launcher, each of the engine's ranks has a scheduler of its own, and kvcached needs one for all "
        "of them: use another --distributed-executor-backend": parallel.distributed_executor_backend
        == "external_launcher"
        and shards_of(config) > 1,
        f"the model has {len(groups)} groups of layers with caches of their own, as models with states "
        "have beside attention; one is supported: use KvcachedHybridConnector": not (
            is_single or (takes_groups and groups)
        ),
        "vLLM drops blocks of this model while a request runs: its layers have sliding windows, states, or attention "
        "that is not to the whole prompt. Use KvcachedHybridConnector; or set --max-model-len to the window's length; "
        "or use no kvcached": is_single and not (keeps_all_blocks or takes_groups),
        "speculative decoding beside several groups of layers is not supported: use KvcachedConnector": takes_groups
        and not keeps_all_blocks
        and config.speculative_config is not None,
        "vLLM computes wrong outputs where a model with multi-head latent attention reads cached blocks on the CPU: "
        "use another model, or no kvcached": device == "cpu" and model.use_mla,
        f"kvcached copies from and to CPUs and CUDA devices, not {device!r}: use no kvcached": device
        not in _DEVICE_TYPES,
        "this vLLM sleeps without a word, and frees memory of its KV cache that may be being copied: use vLLM 0.33, or "
        "set no --enable-sleep-mode": device == "cuda" and model.enable_sleep_mode and not tells_of_sleep,
        "vLLM takes blocks of a request that it preempts in the step that was to compute them for computed: set "
        "--scheduling-policy fcfs, or --no-enable-prefix-caching": config.scheduler_config.policy == "priority"
        and config.cache_config.enable_prefix_caching,
        "vLLM takes blocks of a step that failed for computed when it goes on after the fault: set no "
        "--enable-fault-tolerance": parallel.enable_fault_tolerance,
        "layers of this model attend to tokens behind them, as a Prefix LM's do, so that a block depends on the whole "
        "prompt: use no kvcached": looks_ahead,
        "vLLM says that no part of this model's prompts may come from a cache: MEAN, CLS and STEP pooling take all "
        "tokens of a prompt in one pass. Pool by LAST, or use no kvcached": not model.is_prefix_caching_supported,
        "a diffusion model computes blocks again after they are full: use no kvcached": model.is_diffusion,
        "vLLM counts pictures instead of hashing them, so that blocks of another picture have the same keys: leave "
        "out --no-enable-prefix-caching, or --mm-processor-cache-gb 0": _counts_media(config),
    }
    found = [reason for reason, is_so in reasons.items() if is_so]
    if found:
        raise ValueError("KvcachedConnector cannot be used here:" + "".join(f"\n- {reason}" for reason in found))


def check_device_memory(config: VllmConfig) -> None:
    """Refuse configurations whose blocks cannot be in the daemon's memory.

    Raises:
        ValueError: all reasons.
    """
    device = config.device_config.device_type
    reasons = {
        f"it is for CPUs and CUDA devices, not for {device!r}": device not in _DEVICE_TYPES,
        "vLLM cannot free it to sleep: set no --enable-sleep-mode": device == "cuda"
        and config.model_config.enable_sleep_mode,
        "vLLM's second model runner warms up in it: set --kernel-config.enable_jit_warmup=False": device == "cpu"
        and getattr(config, "use_v2_model_runner", False)
        and config.kernel_config.enable_jit_warmup,
        "prefix caching is off, so nothing in it would be found again": not config.cache_config.enable_prefix_caching,
        "speculative decoding writes blocks after the pass that they belong to": config.speculative_config is not None,
    }
    found = [reason for reason, is_so in reasons.items() if is_so]
    if found:
        raise ValueError(
            'kv_connector_extra_config: device_memory cannot be "daemon" here, leave it out:'
            + "".join(f"\n- {reason}" for reason in found)
        )


def _counts_media(config: VllmConfig) -> bool:
    """Whether vLLM numbers the pictures of each process: it hashes them only where one of its own caches needs that."""
    media = getattr(config.model_config, "multimodal_config", None)
    is_hashed = media is None or media.mm_processor_cache_gb > 0 or config.cache_config.enable_prefix_caching
    return not is_hashed


def embeddings_warning(config: VllmConfig) -> str | None:
    """What to say where vLLM takes embeddings from its clients because it has a connector; None where it does not.

    vLLM takes an engine whose connector loads for the half of a split deployment that is sent embeddings in place of
    pictures. The process that reads requests creates no connector, so that a connector cannot undo this.
    """
    media = getattr(config.model_config, "multimodal_config", None)
    if not getattr(media, "allow_missing_mm_embeddings", False):
        return None
    return (
        "because it has a connector, this vLLM takes embeddings of pictures, sound and video from its clients, even "
        "without the tensors, and such a request can end the engine: serve trusted clients only; or let a proxy refuse "
        "parts of messages with image_embeds, audio_embeds or video_embeds; or, where only text is served, set "
        "--language-model-only (vLLM 0.33)"
    )


def kv_heads(config: VllmConfig) -> int:
    """KV heads of the model, on all ranks together: of the layers that have most."""
    return _heads(config.model_config)


def canonical_heads(config: VllmConfig) -> int:
    """KV heads of each layer, where all have equally many.

    That is vLLM's number; tensors tell where some layers have more. Only an only head, which ranks repeat, looks in the
    tensors of several ranks like one of several heads, which they divide.
    """
    named = _named_heads(config.model_config)
    return named if named > 1 else kv_heads(config)


def _heads(model: VllmConfig) -> int:
    """The most that a layer has. VLLM names one number for all layers, which may be that of the first one."""
    return max([_named_heads(model), *_further_heads(model.hf_text_config.to_dict())])


def _named_heads(model: VllmConfig) -> int:
    named: int = 1 if model.use_mla else model.get_total_num_kv_heads()
    return named


def _further_heads(config: Mapping[str, Any]) -> Iterator[int]:
    """Numbers of KV heads that a model's configuration names for some layers only."""
    for name, value in config.items():
        if _KV_HEADS.search(name) and name not in _KV_HEADS_OF_ALL and not name.startswith(_OF_OTHER_LAYERS):
            yield from [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)]
    yield _field(config.get("attention_other_setting"), "num_attention_groups") or 0  # Step 3.5
    for block in config.get("block_configs") or ():  # Nemotron NAS
        if sharing := _field(_field(block, "attention"), "n_heads_in_group"):
            yield config["num_attention_heads"] // sharing


def _field(part: object, name: str) -> Any:  # noqa: ANN401 - of a configuration
    return part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)


def shards_of(config: VllmConfig) -> int:
    """Workers with a part of every block: of each pipeline stage, one for every rank of tensor parallelism."""
    parallel = config.parallel_config
    shards: int = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    return shards


def parallel_label(config: VllmConfig) -> str:
    """How people call the number of ranks and of pipeline stages: "tp2", "tp2 pp4"."""
    ranks, stages = config.parallel_config.tensor_parallel_size, config.parallel_config.pipeline_parallel_size
    return f"tp{ranks}" if stages == 1 else f"tp{ranks} pp{stages}"


def is_replicated(config: VllmConfig, *, has_states: bool) -> bool:
    """Whether every rank computes the same bytes of a block: vLLM repeats a single head, and divides all else.

    Args:
        config: vLLM's configuration, a supported one.
        has_states: whether some layers keep states, which ranks divide.
    """
    ranks: int = config.parallel_config.tensor_parallel_size
    draft = getattr(config.speculative_config, "draft_model_config", None)
    is_single = kv_heads(config) == 1 < ranks and not has_states and (draft is None or _heads(draft) == 1)
    return is_single and shards_of(config) == ranks  # pipeline stages have other layers
