"""The keyspace, which decides which SGLang processes share pages: a digest of everything that page hashes leave out.

SGLang's page hashes name tokens, the adapter, and the request's salt. They name neither the model nor the part of it
that a process holds. As in vLLM's connector, everything that SGLang says of the model, of its experts and of its states
is included unless it is known to leave keys and values unchanged. What SGLang says of how it computes, and environment
variables, mostly leave them unchanged: of these, what is known to change them is included.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from kvcached_client.sglang.computation import computed_with
from kvcached_client.vllm.identity import CONFIG_IGNORED, MADE_UP, canonical, has_scaled_rope

#: SGLang is untyped here.
SglangObject: TypeAlias = Any
#: (path or name of a model, revision, download directory) -> name and digest of each file; none without weights.
Content: TypeAlias = Callable[[str, str | None, str | None], list[list[str]]]

_PERSON: Final = b"kvcached sglang1"
#: Settings that say how and where from a model is loaded, how long prompts may be, or where experts are computed, not
#: what the model computes.
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
        "kt_cpuinfer",
        "kt_threadpool_count",
        "enable_eplb",
        "expert_balancedness_report_mode",
        "mooncake_ib_device",
        "int8_mamba_ckpt_size",
        "mamba_max_states_per_path",
        "mamba_track_interval",
    }
)
_PREFIXES_IGNORED: Final = (
    "weight_",
    "remote_instance_",
    "checkpoint_engine_",
    "decrypted_",
    "eplb_",
    "elastic_ep_",
    "expert_distribution_",
)
#: Settings that name further files, or a directory of them: their content counts.
_FURTHER_FILES: Final = ("quantization_param_path", "modelopt_checkpoint_restore_path", "kt_weight_path")
#: With these load formats, what is loaded is not what is in the files of the model's path.
_FROM_ELSEWHERE: Final = ("remote_instance", "ipc_cache", "expert_pack", "private", "presharded", "npcache")
#: SGLang's setting of functions that may change what modules of the model put out.
_FORWARD_HOOKS: Final = "forward_hooks"
#: What brings code that is in no file of the model, by the setting that has it.
_OTHER_CODE: Final[Mapping[str, str]] = {
    _FORWARD_HOOKS: "--forward-hooks",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "SGLANG_EXTERNAL_MODEL_PACKAGE",
    "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE",
}


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What SGLang says of the model that it has loaded.

    Attributes:
        settings: SGLang's settings of the model, of its experts, and of its states, and what else decides on what it
            computes, by name.
        config: the model's configuration, as a dictionary.
        dtype: of activations.
        device: kind of device.
        seed: of weights that are made up.
        version: of SGLang.
        adapters: name and path of each LoRA adapter that SGLang is started with.
    """

    settings: Mapping[str, Any]
    config: Mapping[str, Any]
    dtype: str
    device: str
    seed: int | None
    version: str
    adapters: Sequence[tuple[str, str]] = ()

    @property
    def path(self) -> str:
        """Where the model is, or its name."""
        return str(self.settings["model_path"])

    def keyspace(self, part: list[object], *, weights_version: str, content: Content) -> bytes:
        """32 bytes that two processes have in common only if equal page hashes mean equal pages.

        Args:
            part: which part of a page's layers and heads the process holds.
            weights_version: any text.
            content: the content of files, see `LoadedWeights.content`.

        Raises:
            ValueError: the weights cannot be identified, and what to do.
        """
        self._check_code(weights_version)
        settings = {
            name: value
            for name, value in self.settings.items()
            if name not in _SETTINGS_IGNORED and name not in _FURTHER_FILES and not name.startswith(_PREFIXES_IGNORED)
        }
        is_made_up = settings.get("load_format") == MADE_UP
        parts: dict[str, object] = {
            "settings": settings,
            "config": {name: value for name, value in self.config.items() if name not in CONFIG_IGNORED},
            "dtype": self.dtype,
            "device": self.device,
            "sglang": self.version,
            "part": part,
            "context": self.settings.get("context_length") if has_scaled_rope(self.config) else None,
            "weights": [self.seed] if is_made_up else self._weights(content, weights_version),
            "further": self._further(content, weights_version),
            "adapters": self._adapters(content, weights_version),
            "weights_version": weights_version,
        }
        return hashlib.blake2b(canonical(parts).encode(), digest_size=32, person=_PERSON).digest()

    def _check_code(self, weights_version: str) -> None:
        """Raise ValueError if nobody says which code changes what the model computes."""
        if weights_version:
            return
        for name, option in _OTHER_CODE.items():
            if self.settings.get(name):
                raise ValueError(
                    f"with {option}, code that is in no file of {self.path} changes what it computes, so that pages of "
                    'other code would be taken for those of this: give a "weights_version", and another one whenever '
                    "that code changes"
                )

    def _weights(self, content: Content, weights_version: str) -> list[object]:
        """The content of the files; or the name, if a version tells what is loaded instead."""
        revision = self.settings.get("revision")
        elsewhere = self._elsewhere()
        found = [] if elsewhere else content(self.path, revision, self.settings.get("download_dir"))
        if not found and not weights_version:
            raise ValueError(
                f"{elsewhere or f'no weight files of {self.path} are found on this machine'}, so that other weights "
                'under that name would be taken for these: give a "weights_version", and another one whenever they '
                "change"
            )
        return [*found] or [self.path, revision]

    def _elsewhere(self) -> str:
        """Why the files of the model's path do not tell what is loaded; empty if they do."""
        load_format = self.settings.get("load_format")
        if load_format in _FROM_ELSEWHERE:
            return f"with --load-format {load_format} the weights of {self.path} are not those of its files"
        if self.settings.get("weight_cache_mode") not in (None, "off"):
            return f"with --weight-cache-mode the weights of {self.path} are those of another process"
        return ""

    def _further(self, content: Content, weights_version: str) -> list[object]:
        """The content of files that other settings name."""
        named = [(name, str(path)) for name in _FURTHER_FILES if (path := self.settings.get(name))]
        return [[name, _named_files(name, path, content, weights_version) or path] for name, path in named]

    def _adapters(self, content: Content, weights_version: str) -> list[object]:
        """The content of adapters. SGLang's page hashes name them by name and path, as they are written."""
        return [
            [name, path, _named_files("lora_paths", path, content, weights_version)]
            for name, path in sorted(self.adapters)
        ]

    def label(self, part: str) -> str:
        """A name for people."""
        name = Path(self.path).name if Path(self.path).exists() else self.path
        return f"{name} {self.dtype} {part}"


def _named_files(setting: str, path: str, content: Content, weights_version: str) -> list[list[str]]:
    """Name and digest of the files that a setting names; none only if a version tells what is in them."""
    files = content(path, None, None)
    if not files and not weights_version:
        raise ValueError(
            f"no files of {path} ({setting}) are found on this machine, so that others under that name would be "
            'taken for these: give a "weights_version", and another one whenever they change'
        )
    return files


def pool_keyspace(keyspace: bytes, name: str, rank: int) -> bytes:
    """The keyspace of a pool beside keys and values: 32 bytes that name the model's part, the pool, and a rank."""
    text = json.dumps([keyspace.hex(), name, rank])
    return hashlib.blake2b(text.encode(), digest_size=32, person=_PERSON).digest()


def described(context: SglangObject, model: SglangObject, version: str) -> ModelDescription:
    """The model that this process has loaded.

    Args:
        context: all of SGLang's settings, in groups.
        model: SGLang's configuration of the model.
        version: of SGLang.
    """
    execution, device = context.config_bag("exec"), context.config_bag("device")
    bags = (context.config_bag("model"), getattr(execution, "moe", None), getattr(execution, "mamba", None))
    settings = {
        name: value for bag in bags if bag is not None for name, value in vars(bag).items() if not name.startswith("_")
    }
    hooked = getattr(context.config_bag("observability"), _FORWARD_HOOKS, None)
    return ModelDescription(
        settings={
            **settings,
            **computed_with(execution, context.config_bag("mm"), os.environ),
            **({_FORWARD_HOOKS: hooked} if hooked else {}),
        },
        config=model.hf_config.to_dict(),
        dtype=str(model.dtype).removeprefix("torch."),
        device=device.device,
        seed=device.random_seed,
        version=version,
        adapters=_adapters_of(context.config_bag("lora")),
    )


def ranks_of(config: SglangObject) -> int:
    """How many processes hold a part of the model each."""
    return int(config.tp_size * config.pp_size * config.attn_cp_size)


def _adapters_of(settings: SglangObject) -> list[tuple[str, str]]:
    """Name and path of each adapter. If adapters are switched off, SGLang leaves them as they are written, unused."""
    return [(each.lora_name, each.lora_path) for each in settings.lora_paths or ()] if settings.enable_lora else []


def part_label_of(config: SglangObject) -> str:
    """Which of the tensor-parallel parts this process holds, for people."""
    whole = f"tp{config.tp_size}"
    return whole if config.tp_size == 1 or config.is_mla_model else f"{whole} rank {config.tp_rank}"


def part_of(config: SglangObject) -> list[object]:
    """Which part of all layers and heads this process holds."""
    context = [config.pp_rank, config.pp_size, config.attn_cp_rank, config.attn_cp_size]
    return [*context, *([] if config.is_mla_model else [config.tp_rank, config.tp_size])]
