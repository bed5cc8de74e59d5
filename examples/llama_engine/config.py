"""What the engine needs to know before it starts: the model's sizes and its own limits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvcached_client.blocks.layout import DType, Layout, layout_from_model_config
from kvcached_client.engines.weights import WeightReader, default_notes_folder, find_snapshot, model_files
from kvcached_client.keys import namespace_root

#: A tensor whose first dimension is 2 reads as K and V to the SDK.
_BLOCKS_MIN = 2


class ModelError(ValueError):
    """The model directory, or its fit to the daemon's pool, is not what this engine can run."""


class LlamaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a Llama model, under the names of a Hugging Face ``config.json``."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool

    def check_pool(self, served: Layout, shards: int) -> None:
        """Refuse a pool whose blocks are not this model's. Block size, dtype and page order are the daemon's choice.

        Raises:
            ModelError: layers, heads or number of shards differ, or the layout has more than one group.
        """
        built_for = self.layout(served.block_size, shards, served.groups[0].dtype)
        if built_for.block_fingerprint() != served.block_fingerprint():
            raise ModelError(f"the daemon's pool is {served}, this model on {shards} shards needs {built_for}")

    def layout(self, block_size: int, shards: int, kv_dtype: DType = "float32") -> Layout:
        """What a block of this model is. Raises BadRequest where it does not split over so many shards."""
        return layout_from_model_config(
            msgspec.to_builtins(self), block_size=block_size, shards=shards, kv_dtype=kv_dtype
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step may hold."""

    #: A prefill chunk ends at the next absolute multiple of this, wherever it starts: a hit that ends on such a
    #: boundary leaves the very chunks that a cold run would compute after it.
    chunk_tokens: int = 128
    #: Rows of one step, decode and prefill together.
    step_tokens: int = 256
    #: Requests that hold a lease at the same time.
    running_max: int = 16

    def __post_init__(self) -> None:
        if min(self.chunk_tokens, self.running_max) < 1 or self.step_tokens < self.chunk_tokens + self.running_max:
            raise ValueError(f"{self}: step_tokens must hold one chunk and one decode row per running request")


@dataclass(frozen=True, slots=True)
class AttachedSettings:
    """The engine's own memory for K and V, where it is not the daemon's."""

    #: Each holds `block_size` tokens of all layers.
    blocks: int = 1024
    #: Engines share what they cache only if they agree in it.
    block_size: int = 16
    #: The longest that one call to the daemon may take.
    deadline_ms: int = 1000

    def __post_init__(self) -> None:
        if self.blocks <= _BLOCKS_MIN or self.block_size < 1:
            raise ValueError(f"{self}: more than {_BLOCKS_MIN} blocks, of one token or more")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One engine group: one scheduler and `tp` shards."""

    model_dir: Path
    #: None: the daemon's default run directory.
    run_dir: Path | None = None
    #: Of the daemon, whose pool is the engine's memory.
    replica: str = "default"
    #: Slots of that pool that are kept for requests which begin while the daemon is away.
    reserve_blocks: int = 0
    #: Given, the engine has memory of its own instead, and of the daemon it uses the host pool.
    attached: AttachedSettings | None = None
    #: Where the shards compute: "cpu", or "cuda", each on the device of its part of the pool.
    device: str = "cpu"
    #: Decode steps are recorded as CUDA graphs, and replayed.
    cuda_graphs: bool = False
    tp: int = 1
    #: Of the random weights, where the model directory has no checkpoint.
    seed: int = 0
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.cuda_graphs and self.device != "cuda":
            raise ModelError("CUDA graphs are of a CUDA device: add --device cuda")


def read_config(model_dir: Path) -> LlamaConfig:
    """The sizes in `model_dir`/config.json, as transformers 4 and 5 write it.

    Raises:
        ModelError: no Llama, or a variant of it that this engine does not compute.
    """
    try:
        raw = msgspec.json.decode((model_dir / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{model_dir}/config.json: {error}") from error
    if raw.get("model_type") != "llama":
        raise ModelError(f"model_type is {raw.get('model_type')!r}; this engine computes 'llama' only")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    refused = {
        "rope_type": rope.get("rope_type", "default") != "default",
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(raw.get("attention_bias")),
        "mlp_bias": bool(raw.get("mlp_bias")),
    }
    if any(refused.values()):
        raise ModelError(f"not computed by this engine: {', '.join(name for name, bad in refused.items() if bad)}")
    heads = raw.get("num_attention_heads", 0)
    known = {
        **raw,
        "num_key_value_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or raw.get("hidden_size", 0) // max(1, heads),
        "rope_theta": rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0,
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
    }
    try:
        return msgspec.convert(known, LlamaConfig)
    except msgspec.ValidationError as error:
        raise ModelError(f"{model_dir}/config.json: {error}") from error


def keyspace(config: LlamaConfig, settings: EngineSettings, layout: Layout) -> bytes:
    """32 bytes for all that makes K and V of the same tokens the same, and that keys do not tell.

    Of a checkpoint that is every byte of its weight files: two fine-tunes of a model may agree in all else.

    Raises:
        ModelError: a weight file cannot be read.
    """
    checkpoint = _weight_digests(settings.model_dir)
    return namespace_root(
        model=hashlib.blake2b(msgspec.json.encode(config)).hexdigest(),
        revision=hashlib.blake2b(msgspec.json.encode(checkpoint or settings.seed)).hexdigest(),
        layout_fingerprint=layout.block_fingerprint(),
        block_size=layout.block_size,
        shards=layout.shards,
        algorithm="blake3",
        generation=0,
    )


def _weight_digests(model_dir: Path) -> list[tuple[str, str]]:
    """Name and digest of each weight file. A file that has not changed since an earlier start is not read again."""
    files = [file for file in model_files(str(model_dir), None, None, find_snapshot) if file.is_weights]
    try:
        digests = WeightReader(default_notes_folder()).digests(files)
    except OSError as error:
        raise ModelError(f"the weight files of {model_dir} cannot be read: {error}") from error
    return [(file.name, digest) for file, digest in zip(files, digests, strict=True)]
