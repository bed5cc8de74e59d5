"""The keyspace, which decides which engines share blocks: a digest of everything that vLLM's block hashes leave out.

If the keyspace contains too much, engines miss each other's blocks; if it contains too little, outputs are wrong. So it
includes everything that is not known to leave keys and values unchanged.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvcached_client.protocol.fields import NAME_LENGTH_MAX
from kvcached_client.vllm.settings import KvCacheConfig, VllmConfig, minor_version

#: Finds a model's files on this machine: (model, revision, download directory) -> a directory, or None.
FindSnapshot = Callable[[str, str | None, str | None], str | None]

_PERSON: Final = b"kvcached vllm 1"
_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt"})
#: Keys of a model's config that do not describe the model.
_CONFIG_IGNORED: Final = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
#: Hash algorithms with this prefix have a random root in every process, unless PYTHONHASHSEED is set.
_RANDOM_ROOT: Final = "xxhash"
_PLAIN_ROPE: Final = frozenset({None, "default"})


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


def identify(
    config: VllmConfig,
    cache: KvCacheConfig,
    *,
    vllm_version: str,
    weights_version: str,
    environment: Mapping[str, str],
    find_snapshot: FindSnapshot,
) -> Identity:
    """The keyspace of an engine.

    Args:
        config: vLLM's configuration.
        cache: vLLM's cache configuration, for the name of the layout.
        vllm_version: version of vLLM; its minor version counts, because the meaning of a block's bytes may change.
        weights_version: from the settings.
        environment: environment of the process, for PYTHONHASHSEED.
        find_snapshot: finds models that are not given as directories.
    """
    model, hashing = config.model_config, config.cache_config.prefix_caching_hash_algo
    seed = environment.get("PYTHONHASHSEED")
    warnings = []
    if hashing.startswith(_RANDOM_ROOT) and seed is None:
        warnings.append(
            f"block hashes of {hashing} begin with a random number of this process: nothing is shared with others, or "
            "after a restart; set PYTHONHASHSEED to the same number everywhere, or --prefix-caching-hash-algo sha256"
        )
    parts: dict[str, object] = {"model": _model(model, config.load_config, find_snapshot, warnings)}
    if (speculative := config.speculative_config) is not None:
        draft = speculative.draft_model_config
        parts["speculative"] = [
            speculative.method,
            None if draft is None else _model(draft, config.load_config, find_snapshot, warnings),
        ]
    parts |= {
        "cache": [
            config.cache_config.cache_dtype,
            sorted(config.cache_config.kv_cache_dtype_skip_layers),
            cache.kv_cache_layout,
        ],
        "device": config.device_config.device_type,
        "tensor_parallel": config.parallel_config.tensor_parallel_size,
        "hashing": [hashing, _root_of(hashing, seed), None if hashing.endswith("_cbor") else sys.version_info[:2]],
        "vllm": minor_version(vllm_version),
        "weights_version": weights_version,
    }
    digest = hashlib.blake2b(_canonical(parts).encode(), digest_size=32, person=_PERSON).digest()
    name = Path(model.model).name if Path(model.model).exists() else model.model
    label = f"{name} {_dtype(model.dtype)} tp{config.parallel_config.tensor_parallel_size}"
    return Identity(digest, label[-NAME_LENGTH_MAX:], tuple(warnings))


def _root_of(hashing: str, seed: str | None) -> str | None:
    """The root of block hashes. A random root need not be in the keyspace, because its keys match no other keys."""
    return "random" if hashing.startswith(_RANDOM_ROOT) and seed is None else seed


def _model(model: VllmConfig, load: VllmConfig, find_snapshot: FindSnapshot, warnings: list[str]) -> list[object]:
    config = {key: value for key, value in model.hf_config.to_dict().items() if key not in _CONFIG_IGNORED}
    weights = list(_weights(model.model, model.revision, load.download_dir, find_snapshot))
    if not weights:
        warnings.append(
            f"no weight files of {model.model} are found on this machine: other weights under that name would read "
            "these blocks; set weights_version in kv_connector_extra_config whenever they change"
        )
    return [
        model.model,
        model.revision,
        model.code_revision,
        _dtype(model.dtype),
        model.quantization,
        model.quantization_config,
        load.load_format,
        model.seed if load.load_format == "dummy" else None,
        config,
        model.max_model_len if _has_scaled_rope(config) else None,
        weights,
    ]


def _weights(
    model: str, revision: str | None, download_dir: str | None, find_snapshot: FindSnapshot
) -> Iterator[tuple[str, int, int]]:
    """Name, size and time of change of each weight file. Reading the files would take as long as loading them."""
    place = model if Path(model).exists() else find_snapshot(model, revision, download_dir)
    if place is None:
        return
    root = Path(place)
    files = [root] if root.is_file() else sorted(file for file in root.rglob("*") if file.suffix in _WEIGHTS)
    for file in files:
        status = file.stat()
        yield os.fspath(file.relative_to(root)), status.st_size, status.st_mtime_ns


def _has_scaled_rope(config: Mapping[str, Any]) -> bool:
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


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)
