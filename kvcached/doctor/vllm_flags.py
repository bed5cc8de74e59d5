"""vLLM's arguments as `kvcached doctor` reads them: what would not work with kvcached, and how to say it instead."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvcached.doctor.arguments import nested, read_arguments
from kvcached.doctor.model_config import read_config, text_config
from kvcached_client.blocks.layout import STATE_SPACE_FIELDS
from kvcached_client.doctor.checks import Finding
from kvcached_client.vllm.keys import PICKLED_ALGORITHMS, SECRET_SEED_ALGORITHMS
from kvcached_client.vllm.settings import read_settings

#: What `--kv-transfer-config` has to say.
TRANSFER_CONFIG: Final = {
    "kv_connector": "KvcachedConnector",
    "kv_connector_module_path": "kvcached_client.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
#: The connector that takes sliding windows and states, with vLLM's hybrid cache manager.
HYBRID_CONNECTOR: Final = "KvcachedHybridConnector"
#: vLLM's own, which joins others. How loads fail that one of them has made is what its configuration says.
_MULTI_CONNECTOR: Final = "MultiConnector"
_POLICY: Final = "kv_load_failure_policy"
#: What is right in that place, too: an engine that only loads.
_ALSO: Final = {"kv_connector": HYBRID_CONNECTOR, "kv_role": "kv_consumer"}
DEFAULT_ALGORITHM: Final = "sha256"
#: vLLM's attention on a CPU refuses others.
_BLOCK_SIZE_UNIT: Final = 32
_SINGLE: Final = ("decode-context-parallel-size", "prefill-context-parallel-size")
#: vLLM's options with one dash, of 0.32 and 0.33.
_SHORT: Final = {
    "-ac": "attention-config",
    "-cc": "compilation-config",
    "-dc": "diffusion-config",
    "-dcp": "decode-context-parallel-size",
    "-dp": "data-parallel-size",
    "-dpa": "data-parallel-address",
    "-dpb": "data-parallel-backend",
    "-dpe": "data-parallel-external-lb",
    "-dph": "data-parallel-hybrid-lb",
    "-dpl": "data-parallel-size-local",
    "-dpm": "data-parallel-multi-port-external-lb",
    "-dpn": "data-parallel-rank",
    "-dpp": "data-parallel-rpc-port",
    "-dpr": "data-parallel-start-rank",
    "-ep": "enable-expert-parallel",
    "-n": "nnodes",
    "-pcp": "prefill-context-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-q": "quantization",
    "-r": "node-rank",
    "-sc": "speculative-config",
    "-tp": "tensor-parallel-size",
}
_TRANSFER: Final = "kv-transfer-config"
_CHECK: Final = "vllm flags"
_MODEL: Final = "model"
#: `layer_types` whose blocks vLLM keeps in one group.
ATTENTION_LAYERS: Final = {"attention", "full_attention", "sliding_attention", "chunked_attention"}
#: Those that keep states.
_STATE_LAYERS: Final = {"conv", "linear_attention", "mamba", "mamba2"}
#: Architectures with attention to the whole prompt (Prefix LM).
_LOOKING_AHEAD: Final = {"HrmTextForCausalLM"}
#: Pooling that takes all tokens of a prompt in one pass, so that vLLM takes no part of it from a cache.
_WHOLE_PROMPT_POOLING: Final = {"MEAN", "CLS", "STEP"}
_POOLER: Final = "pooler-config"
#: Flags with which the connector refuses states.
_WITHOUT_STATES: Final = ("no-enable-prefix-caching", "speculative-config")
#: Models with some layers of full attention whose older configurations do not say which.
_MIXED_MODELS: Final = {"gemma2", "gemma3", "gemma3_text", "cohere2", "gpt_oss"}


@dataclass(frozen=True, slots=True)
class VllmFlags:
    """vLLM's command line, as far as it matters here.

    Attributes:
        options: values by name, without the dashes before it and with dashes in it; "" for one without a value.
        words: what belongs to no option: "serve", the model.
    """

    options: dict[str, str] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)

    @property
    def algorithm(self) -> str:
        """How blocks are hashed."""
        return self.options.get("prefix-caching-hash-algo", DEFAULT_ALGORITHM)

    @property
    def is_hybrid(self) -> bool:
        """Whether the connector that they name takes models with states, or whose layers all have sliding windows."""
        return any(HYBRID_CONNECTOR in value for name, value in self.options.items() if name.startswith(_TRANSFER))

    def has(self, name: str) -> bool:
        """Whether an option is there, or fields of it behind dots."""
        return any(option.partition(".")[0] == name for option in self.options)

    @property
    def model(self) -> str:
        """Name or path of the model; "" where none is named."""
        words = self.words[1:] if self.words[:1] == ["serve"] else self.words
        return self.options.get("model") or (words[0] if words else "")


def parse(arguments: Sequence[str]) -> VllmFlags:
    """Read vLLM's arguments. Those that do not matter here are taken as they come."""
    return VllmFlags(*read_arguments(arguments, _SHORT))


def check_flags(
    flags: VllmFlags, environment: Mapping[str, str], run_dir: Path, *, on_cuda: bool = False
) -> Iterator[Finding]:
    """What of vLLM's arguments does not fit.

    Args:
        flags: vLLM's arguments.
        environment: of the engine, for PYTHONHASHSEED.
        run_dir: of the daemon that is meant.
        on_cuda: whether vLLM computes on CUDA devices; it is taken to compute on CPUs otherwise.
    """
    sizes = _block_size(flags) if not on_cuda else _sleep_mode(flags)
    found = [*_transfer_config(flags, run_dir, on_cuda=on_cuda), *_hashing(flags, environment), *sizes]
    found += [*_single(flags), *_nodes(flags), *_policy(flags), *_fault_tolerance(flags), *_pooling(flags)]
    yield from found
    if not any(finding.level == "fail" for finding in found):
        yield Finding(_CHECK, "ok", "nothing in vLLM's arguments keeps it from using kvcached")


def _transfer_config(flags: VllmFlags, run_dir: Path, *, on_cuda: bool) -> Iterator[Finding]:
    whole = f"--kv-transfer-config '{json.dumps(TRANSFER_CONFIG)}'"
    text = flags.options.get(_TRANSFER)
    dotted = nested(flags.options, _TRANSFER)
    if text is None and not dotted:
        yield Finding(_CHECK, "fail", "--kv-transfer-config is missing: vLLM would not use kvcached", f"add {whole}")
        return
    if text is not None and dotted:
        said = "--kv-transfer-config is not read by vLLM where fields of it stand behind dots"
        yield Finding(_CHECK, "fail", said, "write all fields in one of the two ways")
        return
    try:
        config: Any = dotted or {**json.loads(text or "{}")}
    except (ValueError, TypeError, RecursionError) as error:
        yield Finding(_CHECK, "fail", f"--kv-transfer-config is no JSON object: {error}", f"write {whole}")
        return
    if config.get("kv_connector") == _MULTI_CONNECTOR:
        yield from _fields(config, ("kv_role", _POLICY))
        config = _joined(config)
        if config is None:
            said = f"--kv-transfer-config: {_MULTI_CONNECTOR} joins no connector of kvcached"
            yield Finding(_CHECK, "fail", said, f"add {json.dumps(TRANSFER_CONFIG)} to its connectors")
            return
    yield from _fields(config, TRANSFER_CONFIG)
    extra = config.get("kv_connector_extra_config", {})
    try:
        settings = read_settings(extra, config.get("kv_role", TRANSFER_CONFIG["kv_role"]))
    except (ValueError, TypeError) as error:
        yield Finding(_CHECK, "fail", str(error), "correct kv_connector_extra_config")
        return
    if settings.run_dir is not None and Path(settings.run_dir).resolve() != run_dir.resolve():
        yield Finding(
            _CHECK,
            "fail",
            f"the connector is told to use the daemon in {settings.run_dir}, not the one in {run_dir}",
            "give both the same run_dir",
        )
    if settings.device_memory == "daemon":
        yield from _device_memory(flags, on_cuda=on_cuda)


def _fields(config: Mapping[str, Any], names: Iterable[str]) -> Iterator[Finding]:
    """What some fields of a connector's configuration do not say as they have to."""
    for name in names:
        wanted = TRANSFER_CONFIG[name]
        if config.get(name) not in (wanted, _ALSO.get(name, wanted)):
            said = repr(config[name]) if name in config else "missing"
            yield Finding(_CHECK, "fail", f"--kv-transfer-config: {name} is {said}", f'write "{name}": "{wanted}"')


def _joined(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration of the connector of kvcached's among those that vLLM's `MultiConnector` joins."""
    extra = config.get("kv_connector_extra_config")
    joined = extra.get("connectors") if isinstance(extra, dict) else None
    own = (TRANSFER_CONFIG["kv_connector"], HYBRID_CONNECTOR)
    connectors = [each for each in joined if isinstance(each, dict)] if isinstance(joined, list) else []
    return next((each for each in connectors if each.get("kv_connector") in own), None)


def _device_memory(flags: VllmFlags, *, on_cuda: bool) -> Iterator[Finding]:
    """What keeps vLLM's KV cache from being in memory of the daemon, or from being found there again."""
    refusing = ("no-enable-prefix-caching", "speculative-config", *(("enable-sleep-mode",) if on_cuda else ()))
    for name in refusing:
        if flags.has(name):
            text = f'--{name}: the connector refuses it beside "device_memory": "daemon"'
            yield Finding(_CHECK, "fail", text, f'leave out --{name}, or "device_memory"')
    if not {"kv-cache-memory-bytes", "kv-cache-memory"} & set(flags.options):
        yield Finding(
            _CHECK,
            "warn",
            "the size of vLLM's KV cache depends on what is free at each start, and memory of another size is not used "
            "again",
            "--kv-cache-memory-bytes SIZE",
        )
    if on_cuda and "gpu-memory-utilization" not in flags.options:
        yield Finding(
            _CHECK,
            "warn",
            "vLLM counts what the daemon keeps on the device as used by somebody else, and starts again only if "
            "--gpu-memory-utilization of the device is free beside it",
            "--gpu-memory-utilization, as a part of the device's memory that is free while the daemon keeps the rest",
        )


def _hashing(flags: VllmFlags, environment: Mapping[str, str]) -> Iterator[Finding]:
    algorithm = flags.algorithm
    if algorithm in SECRET_SEED_ALGORITHMS and "PYTHONHASHSEED" not in environment:
        yield Finding(
            _CHECK,
            "fail",
            f"block hashes of {algorithm} begin with a random number: nothing is found again after a restart",
            "--prefix-caching-hash-algo sha256_cbor, or set PYTHONHASHSEED to the same number for every engine",
        )
    if algorithm in PICKLED_ALGORITHMS:
        yield Finding(
            _CHECK,
            "warn",
            f"block hashes of {algorithm} depend on Python's pickle: only engines of one Python and one vLLM share "
            "blocks, and `kvcached explain` cannot compute their keys",
            "--prefix-caching-hash-algo sha256_cbor",
        )


def _block_size(flags: VllmFlags) -> Iterator[Finding]:
    block_size = flags.options.get("block-size", "")
    if block_size.isdecimal() and (int(block_size) == 0 or int(block_size) % _BLOCK_SIZE_UNIT):
        yield Finding(
            _CHECK,
            "fail",
            f"--block-size {block_size}: vLLM's attention on a CPU takes multiples of {_BLOCK_SIZE_UNIT} only",
            f"--block-size {_BLOCK_SIZE_UNIT}",
        )


def _sleep_mode(flags: VllmFlags) -> Iterator[Finding]:
    if "enable-sleep-mode" in flags.options:
        text = (
            "--enable-sleep-mode: the connector refuses it with vLLM 0.32, which frees memory that may be being copied"
        )
        yield Finding(_CHECK, "warn", text, "vLLM 0.33 or newer, or leave out --enable-sleep-mode")


def _single(flags: VllmFlags) -> Iterator[Finding]:
    for name in _SINGLE:
        if flags.options.get(name, "1") != "1":
            yield Finding(_CHECK, "fail", f"--{name} {flags.options[name]} is not supported", f"leave out --{name}")


def _nodes(flags: VllmFlags) -> Iterator[Finding]:
    """Whether an engine is on several nodes. For that, each rank of data parallelism is an engine, as vLLM counts."""
    nodes, ranks = _number(flags, "nnodes", 1), _number(flags, "data-parallel-size", 1)
    ranks_on_one = _number(flags, "data-parallel-size-local", ranks // nodes)
    nodes_of_one = nodes // max(ranks // ranks_on_one, 1)
    if nodes_of_one > 1:
        told = f"--nnodes {nodes}: an engine's workers on {nodes_of_one} nodes cannot map one host pool"
        fix = "leave out --nnodes, or let --data-parallel-size be a multiple of it: each rank is an engine"
        yield Finding(_CHECK, "fail", told, fix)


def _number(flags: VllmFlags, name: str, default: int) -> int:
    """The number that an option gives, at least 1. vLLM says so where it is none."""
    text = flags.options.get(name, "")
    return max(int(text) if text.isdecimal() else default, 1)


def _policy(flags: VllmFlags) -> Iterator[Finding]:
    if flags.options.get("scheduling-policy") == "priority" and "no-enable-prefix-caching" not in flags.options:
        told = "with --scheduling-policy priority, vLLM finds blocks in its own cache that it has not computed"
        yield Finding(_CHECK, "fail", told, "leave it out, or add --no-enable-prefix-caching")


def _fault_tolerance(flags: VllmFlags) -> Iterator[Finding]:
    if "enable-fault-tolerance" in flags.options:
        told = "with --enable-fault-tolerance, vLLM goes on after a step that failed, and takes its blocks for computed"
        yield Finding(_CHECK, "fail", told, "leave out --enable-fault-tolerance")


def _pooling(flags: VllmFlags) -> Iterator[Finding]:
    try:
        config = nested(flags.options, _POOLER) or json.loads(flags.options.get(_POOLER) or "{}")
    except (ValueError, RecursionError):
        return  # vLLM says so
    for name in ("seq_pooling_type", "tok_pooling_type"):
        kind = config.get(name) if isinstance(config, dict) else None
        if kind in _WHOLE_PROMPT_POOLING:
            told = f"--{_POOLER}: {name} {kind} takes all tokens of a prompt in one pass, and the connector refuses it"
            yield Finding(_CHECK, "fail", told, "pool by LAST, or use no kvcached")


def check_model(model: str, flags: VllmFlags, *, on_cuda: bool = False) -> Iterator[Finding]:
    """Whether vLLM and the connector take a model's kinds of layers; nothing where its configuration is not here.

    Args:
        model: folder of a model, or its config.json.
        flags: vLLM's arguments, for the longest context.
        on_cuda: as for `check_flags`.
    """
    try:
        config = read_config(model)
    except (OSError, ValueError):
        return
    text = text_config(config)
    for architecture in _LOOKING_AHEAD.intersection(map(str, config.get("architectures") or ())):
        words = f"{architecture} attends to the whole prompt (Prefix LM), so that blocks depend on what follows them"
        yield Finding(_MODEL, "fail", f"{words}, and the connector refuses it", "use another model, or no kvcached")
    if text.get("kv_lora_rank") and not on_cuda:
        yield Finding(
            _MODEL,
            "fail",
            "vLLM computes wrong outputs where a model with multi-head latent attention (kv_lora_rank) reads cached "
            "blocks on the CPU, and the connector refuses it",
            "use another model, or no kvcached",
        )
    others = set(text.get("layer_types") or ()) - ATTENTION_LAYERS
    if others or any(name in text for name in STATE_SPACE_FIELDS):
        yield from _check_states(text, others, flags)
        return
    window = _only_window(text)
    longest = flags.options.get("max-model-len") or text.get("max_position_embeddings")
    if window and not flags.is_hybrid and not (str(longest).isdecimal() and int(str(longest)) <= window):
        yield Finding(
            _MODEL,
            "fail",
            f"all layers of the model have sliding windows of {window} tokens: vLLM drops blocks behind them, and the "
            "connector refuses longer contexts",
            f"name the connector {HYBRID_CONNECTOR}, or --max-model-len {window}, or use no kvcached",
        )


def _check_states(text: Mapping[str, Any], others: set[str], flags: VllmFlags) -> Iterator[Finding]:
    """Whether the connector takes a model with layers that are not attention."""
    named = ", ".join(sorted(others)) or "state space"
    kinds = set(text.get("layer_types") or ())
    has_attention = bool(kinds & ATTENTION_LAYERS) if kinds else "num_attention_heads" in text
    if others - _STATE_LAYERS or not has_attention:
        fix = "use another model, or no kvcached"
        words = f"the model has layers that are not attention ({named})"
        why = "the connector does not support them" if has_attention else "and none with attention, which vLLM needs"
        yield Finding(_MODEL, "fail", f"{words}: {why}", fix)
    elif not flags.is_hybrid:
        words = f"the model has layers with states ({named}), which the connector does not support"
        yield Finding(_MODEL, "fail", words, f"name the connector {HYBRID_CONNECTOR}")
    for name in _WITHOUT_STATES:
        if flags.has(name):
            words = f"--{name}: the connector refuses it for a model with states ({named})"
            yield Finding(_MODEL, "fail", words, f"leave out --{name}")


def _only_window(text: Mapping[str, Any]) -> int:
    """Tokens of the sliding window that all layers of a model have; 0 where some have none."""
    window, kinds = text.get("sliding_window"), set(text.get("layer_types") or ())
    if not isinstance(window, int) or text.get("use_sliding_window") is False:
        return 0
    if kinds:
        return window if kinds == {"sliding_attention"} else 0
    is_mixed = (
        text.get("model_type") in _MIXED_MODELS or "sliding_window_pattern" in text or "max_window_layers" in text
    )
    return 0 if is_mixed else window
