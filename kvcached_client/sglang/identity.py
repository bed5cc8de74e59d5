"""The keyspace, which decides which SGLang processes share pages: a digest of everything that page hashes leave out.

SGLang's page hashes name tokens, the adapter, and the request's salt. They name neither the model nor the part of it
that a process holds. As in vLLM's connector, everything is included that is not known to leave keys and values
unchanged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from kvcached_client.engines.weights import FindSnapshot, WeightReader, model_files
from kvcached_client.vllm.identity import CONFIG_IGNORED, MADE_UP, has_scaled_rope
from kvcached_client.vllm.settings import minor_version

#: SGLang is untyped here.
SglangObject: TypeAlias = Any

_PERSON: Final = b"kvcached sglang1"
#: Settings of the model that say how and where from it is loaded, or how long prompts may be, not what it computes.
_SETTINGS_IGNORED: Final = frozenset(
    {
        "model_path",
        "revision",
        "download_dir",
        "context_length",
        "trust_remote_code",
        "model_checksum",
        "engine_info_bootstrap_port",
        "delete_ckpt_after_loading",
        "is_startup_weight_load_overlap",
        "startup_weight_load_mode",
        "modelexpress_config",
    }
)
_PREFIXES_IGNORED: Final = ("weight_", "remote_instance_", "checkpoint_engine_", "decrypted_")


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What SGLang says of the model that it has loaded.

    Attributes:
        settings: SGLang's settings of the model, by name.
        config: the model's configuration, as a dictionary.
        dtype: of activations.
        device: kind of device.
        seed: of weights that are made up.
        version: of SGLang.
    """

    settings: Mapping[str, Any]
    config: Mapping[str, Any]
    dtype: str
    device: str
    seed: int | None
    version: str

    @property
    def path(self) -> str:
        """Where the model is, or its name."""
        return str(self.settings["model_path"])

    def keyspace(
        self, part: list[object], *, weights_version: str, reader: WeightReader, find_snapshot: FindSnapshot
    ) -> bytes:
        """32 bytes that two processes have in common only if equal page hashes mean equal pages.

        Reads the weight files, unless their digests are remembered.

        Args:
            part: which part of a page's layers and heads the process holds.
            weights_version: any text.
            reader: reads the files.
            find_snapshot: finds a model that is not given as a directory.

        Raises:
            ValueError: the weights cannot be identified, and what to do.
        """
        settings = {
            name: value
            for name, value in self.settings.items()
            if name not in _SETTINGS_IGNORED and not name.startswith(_PREFIXES_IGNORED)
        }
        is_made_up = settings.get("load_format") == MADE_UP
        parts: dict[str, object] = {
            "settings": settings,
            "config": {name: value for name, value in self.config.items() if name not in CONFIG_IGNORED},
            "dtype": self.dtype,
            "device": self.device,
            "sglang": minor_version(self.version) or self.version,
            "part": part,
            "context": self.settings.get("context_length") if has_scaled_rope(self.config) else None,
            "weights": [self.seed] if is_made_up else self._weights(reader, find_snapshot, weights_version),
            "weights_version": weights_version,
        }
        text = json.dumps(parts, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=32, person=_PERSON).digest()

    def _weights(self, reader: WeightReader, find_snapshot: FindSnapshot, weights_version: str) -> list[object]:
        """The content of the files; or the name, if there are none and a version tells what is in them."""
        settings = self.settings
        files = model_files(self.path, settings.get("revision"), settings.get("download_dir"), find_snapshot)
        if not any(file.is_weights for file in files):
            if weights_version:
                return [self.path, settings.get("revision")]
            raise ValueError(
                f"no weight files of {self.path} are found on this machine, so that other weights under that name "
                'would be taken for these: give a "weights_version", and another one whenever they change'
            )
        try:
            digests = reader.digests(files)
        except OSError as error:
            raise ValueError(f"the weight files of {self.path} cannot be read: {error}") from error
        return [[file.name, digest] for file, digest in zip(files, digests, strict=True)]

    def label(self, part: str) -> str:
        """A name for people."""
        name = Path(self.path).name if Path(self.path).exists() else self.path
        return f"{name} {self.dtype} {part}"


def pool_keyspace(keyspace: bytes, name: str, rank: int) -> bytes:
    """The keyspace of a pool beside keys and values: 32 bytes that name the model's part, the pool, and a rank."""
    text = json.dumps([keyspace.hex(), name, rank])
    return hashlib.blake2b(text.encode(), digest_size=32, person=_PERSON).digest()
