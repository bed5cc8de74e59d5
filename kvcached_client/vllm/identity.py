"""The keyspace, which decides which engines share blocks: a digest of everything that vLLM's block hashes leave out.

If the keyspace contains too much, engines miss each other's blocks; if it contains too little, outputs are wrong. So it
includes everything that is not known to leave keys and values unchanged. The number of ranks is not in it: it is part
of the layout, with which the keyspace makes a namespace.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvcached_client.engines.weights import FindSnapshot, ModelFile, WeightReader, model_files
from kvcached_client.protocol.fields import NAME_LENGTH_MAX
from kvcached_client.vllm.settings import KvCacheConfig, VllmConfig, minor_version, parallel_label

#: What this machine's processors have.
_CPU_INFO: Final = Path("/proc/cpuinfo")
_PERSON: Final = b"kvcached vllm 2"
#: Weights of this load format are made from a seed.
MADE_UP: Final = "dummy"
#: Keys of a model's config that do not describe the model.
CONFIG_IGNORED: Final = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
#: Hash algorithms with this prefix have a random root in every process, unless PYTHONHASHSEED is set.
_RANDOM_ROOT: Final = "xxhash"
_PLAIN_ROPE: Final = frozenset({None, "default"})
#: Speculation that finds its guesses in the text: no layer in the cache is the drafter's.
_WITHOUT_LAYERS: Final = frozenset({"ngram", "ngram_gpu", "suffix"})
#: What JSON takes for a key.
_JSON_KEYS: Final = (str, int, float, type(None))


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity that an engine declares.

    Attributes:
        keyspace: 32 bytes.
        label: name for people.
        warnings: weaknesses of the keyspace, each with what to do.
    """

    keyspace: bytes
    label: str
    warnings: tuple[str, ...]


class EngineDescription:
    """What an engine's configuration and files were when it loaded its model. `identify` reads the files later.

    Args:
        config: vLLM's configuration.
        cache: vLLM's cache configuration, for the name of the layout.
        vllm_version: version of vLLM; its minor version counts, because the meaning of a block's bytes may change.
        weights_version: from the settings.
        environment: environment of the process, for PYTHONHASHSEED.
        find_snapshot: finds models that are not given as directories.
        groups: the groups of layers whose blocks have keys of their own; None = one group.

    Raises:
        OSError: the file that scales the encoder of pictures cannot be read, from which vLLM has loaded it.
    """

    def __init__(
        self,
        config: VllmConfig,
        cache: KvCacheConfig,
        *,
        vllm_version: str,
        weights_version: str,
        environment: Mapping[str, str],
        find_snapshot: FindSnapshot,
        groups: list[list[object]] | None = None,
    ) -> None:
        hashing, seed = config.cache_config.prefix_caching_hash_algo, environment.get("PYTHONHASHSEED")
        self._warnings = []
        if hashing.startswith(_RANDOM_ROOT) and seed is None:
            self._warnings.append(
                f"block hashes of {hashing} begin with a random number of this process: nothing is shared with others, "
                "or after a restart; set PYTHONHASHSEED to the same number everywhere, or --prefix-caching-hash-algo "
                "sha256"
            )
        self._model = _Model(config.model_config, config.load_config, find_snapshot)
        self._speculative: tuple[str, _Model | None] | None = None
        if (speculative := config.speculative_config) is not None and speculative.method not in _WITHOUT_LAYERS:
            draft = speculative.draft_model_config
            made = None if draft is None else _Model(draft, config.load_config, find_snapshot)
            self._speculative = speculative.method, made
        self._parts: dict[str, object] = {
            "cache": [
                config.cache_config.cache_dtype,
                sorted(config.cache_config.kv_cache_dtype_skip_layers),
                cache.kv_cache_layout,
            ],
            "device": _device(config.device_config.device_type, _dtype(config.model_config.dtype)),
            "hashing": [hashing, _root_of(hashing, seed), None if hashing.endswith("_cbor") else sys.version_info[:2]],
            "vllm": minor_version(vllm_version),
            "weights_version": weights_version,
        }
        if groups is not None:
            self._parts["groups"] = groups
        model = config.model_config
        if any(media := _media(model)):  # None of it in most engines, whose keyspaces stay as they were without it
            self._parts["media"] = media
        if model.model_class_overrides:
            self._parts["classes"] = model.model_class_overrides
        name = Path(model.model).name if Path(model.model).exists() else model.model
        if (stages := config.parallel_config.pipeline_parallel_size) > 1:
            # Tensors of stages have no names, which else tell vLLM's own code of a model from that of Transformers.
            self._parts["stages"] = [stages, environment.get("VLLM_PP_LAYER_PARTITION"), model.architecture]
        self._label = f"{name} {_dtype(model.dtype)} {parallel_label(config)}"

    def identify(self, reader: WeightReader) -> Identity:
        """The keyspace of the engine. Reads all weight files that were not read before, which may take minutes.

        Raises:
            ReadingStopped: the process ends.
        """
        warnings = list(self._warnings)
        parts = self._parts | {"model": self._model.parts(reader, warnings)}
        if self._speculative is not None:
            method, draft = self._speculative
            parts["speculative"] = [method, None if draft is None else draft.parts(reader, warnings)]
        digest = hashlib.blake2b(canonical(parts).encode(), digest_size=32, person=_PERSON).digest()
        return Identity(digest, self._label[-NAME_LENGTH_MAX:], tuple(warnings))


def _device(kind: str, dtype: str) -> str:
    """The kind of device; of CPUs also what decides in which order vLLM's kernels keep the bytes of a block."""
    if kind != "cpu":
        return kind
    has_tiles = dtype == "bfloat16" and b" amx_tile" in _CPU_INFO.read_bytes()
    return f"cpu {platform.machine()} amx" if has_tiles else f"cpu {platform.machine()}"


def _media(model: VllmConfig) -> list[object]:
    """What of a model's settings for pictures and other media decides on embeddings, and is in no hash of a picture."""
    settings = getattr(model, "multimodal_config", None)
    names = ("mm_processor_kwargs", "video_pruning_rate", "mm_encoder_attn_dtype")
    found: list[object] = [getattr(settings, name, None) or None for name in names]
    if found[1]:  # without a rate, no method prunes anything
        found.append(["pruning", getattr(settings, "video_pruning_method", None)])
    if scales := getattr(settings, "mm_encoder_fp8_scale_path", None):
        found.append(["scales", hashlib.blake2b(Path(scales).read_bytes(), digest_size=32).hexdigest()])
    return found


def _root_of(hashing: str, seed: str | None) -> str | None:
    """The root of block hashes. A random root need not be in the keyspace, because its keys match no other keys."""
    return "random" if hashing.startswith(_RANDOM_ROOT) and seed is None else seed


class _Model:
    """A model, and the state of its files when it was loaded."""

    def __init__(self, model: VllmConfig, load: VllmConfig, find_snapshot: FindSnapshot) -> None:
        config = {key: value for key, value in model.hf_config.to_dict().items() if key not in CONFIG_IGNORED}
        self._name, self._revision = model.model, model.revision
        self._is_made_up = load.load_format == MADE_UP
        self._files = model_files(model.model, model.revision, load.download_dir, find_snapshot)
        self._parts: list[object] = [
            # Code of another revision is not among the files: then the name tells whose code it is.
            None if model.code_revision is None else [model.model, model.code_revision],
            _dtype(model.dtype),
            model.quantization,
            model.quantization_config,
            load.load_format,
            load.model_loader_extra_config,
            model.seed if self._is_made_up else None,
            config,
            model.max_model_len if has_scaled_rope(config) else None,
        ]

    def parts(self, reader: WeightReader, warnings: list[str]) -> list[object]:
        """Everything that tells this model from others."""
        return [*self._source(reader, warnings), *self._parts]

    def _source(self, reader: WeightReader, warnings: list[str]) -> list[object]:
        """The content of the files; or where they are, if their content is not known."""
        if not any(file.is_weights for file in self._files):
            warnings.append(
                f"no weight files of {self._name} are found on this machine: other weights under that name would read "
                "these blocks; set weights_version in kv_connector_extra_config whenever they change"
            )
        elif not self._is_made_up:
            try:
                return ["content", *_named(self._files, reader.digests(self._files))]
            except OSError as error:
                warnings.append(
                    f"blocks are shared only with engines that load the same files of {self._name}, not with those "
                    f"that load equal files: {error}"
                )
        times = [(file.name, file.state.size, file.state.modified) for file in self._files]
        return ["place", self._name, self._revision, times]


def _named(files: Sequence[ModelFile], digests: Sequence[str]) -> list[object]:
    return [[file.name, digest] for file, digest in zip(files, digests, strict=True)]


def has_scaled_rope(config: Mapping[str, Any]) -> bool:
    """Whether the encoding of positions may depend on the maximum context length."""
    text = config.get("text_config") or config
    return not set(_rope_types(text.get("rope_parameters") or text.get("rope_scaling") or {})) <= _PLAIN_ROPE


def _rope_types(rope: Mapping[str, Any]) -> Iterator[str | None]:
    """The rope types in a model's config, which may have one for each kind of layer."""
    yield rope.get("rope_type", rope.get("type"))
    for value in rope.values():
        if isinstance(value, Mapping):
            yield from _rope_types(value)


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def canonical(value: object) -> str:
    """The same text for equal values, as JSON, which by itself cannot order keys of several types."""
    return json.dumps(_ordered(value), default=str)


def _ordered(value: object) -> object:
    if isinstance(value, dict):
        keys = {key if isinstance(key, _JSON_KEYS) else str(key): each for key, each in value.items()}
        order = sorted(keys, key=lambda key: (type(key).__name__, "" if key is None else key))
        return {key: _ordered(keys[key]) for key in order}
    return [_ordered(each) for each in value] if isinstance(value, (list, tuple)) else value
