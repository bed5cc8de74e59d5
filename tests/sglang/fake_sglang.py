"""As much of SGLang 0.5.23 as its storages see: the modules they import, and a host pool of numpy."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

PAGE_SIZE, LAYERS, HEADS, HEAD_DIM, PAGES = 16, 3, 2, 8, 20
CONFIG: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": LAYERS, "_name_or_path": "somewhere"}


def hashes(count: int, name: str = "") -> list[str]:
    """As SGLang's page hashes."""
    return [hashlib.sha256(f"{name} {number}".encode()).hexdigest() for number in range(count)]


def places(*pages: int, size: int = PAGE_SIZE) -> np.ndarray[Any, Any]:
    """Indices of the tokens of pages, as SGLang gives them."""
    return np.concatenate([np.arange(page * size, (page + 1) * size) for page in pages])


def behind(*prefix: str) -> SimpleNamespace:
    """What SGLang says beside the pages of a call."""
    return SimpleNamespace(prefix_keys=list(prefix))


class HiCacheStorage:
    """The base class, in what it does."""

    mem_pool_host: Any

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        if not hasattr(self, "registered_pools"):
            self.registered_pools: dict[str, Any] = {}
        self.registered_pools[host_pool_name] = host_pool

    def on_host_pools_registered(self) -> None:
        """All pools are known."""


@dataclass
class PoolTransfer:
    """Pages of a pool beside that of keys and values."""

    name: str
    keys: list[str] | None = None
    host_indices: Any = None
    hit_policy: str = "all_pages"


@dataclass
class PoolTransferResult:
    """What is stored of a prompt."""

    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


class MHATokenToKVPoolHost:
    """A host pool: keys, then values, of all tokens of all layers; and of which layout they are on the device."""

    def __init__(
        self, seed: int = 0, *, layout: str = "page_first", pages: int = PAGES, device_layout: str = "nhd"
    ) -> None:
        buffers = SimpleNamespace(layout=SimpleNamespace(value=device_layout))
        self._buffer_infos = (SimpleNamespace(buffers=buffers),)
        self.layout, self.page_size, self.size, self.layer_num = layout, PAGE_SIZE, pages * PAGE_SIZE, LAYERS
        self.dtype, self.start_layer, self.end_layer, self.storage_format_tag = "torch.float32", 0, LAYERS, None
        shape = (LAYERS, self.size) if layout == "layer_first" else (self.size, LAYERS)
        self.content = np.random.default_rng(seed).random((2, *shape, HEADS, HEAD_DIM), np.float32)

    def page(self, page: int) -> bytes:
        """What a page holds."""
        tokens = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
        found = self.content[:, :, tokens] if self.layout == "layer_first" else self.content[:, tokens]
        return found.tobytes()

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        token_bytes = HEADS * HEAD_DIM * 4
        addresses: list[int] = []
        for first in indices.tolist()[:: self.page_size]:
            for half in self.content:
                if self.layout == "layer_first":
                    addresses += [layer.ctypes.data + first * token_bytes for layer in half]
                else:
                    addresses.append(half.ctypes.data + first * LAYERS * token_bytes)
        size = self.page_size * token_bytes * (1 if self.layout == "layer_first" else LAYERS)
        return addresses, [size] * len(addresses)


class MambaPoolHost:
    """A host pool of states, one a page."""

    layout, page_size, layer_num = "page_first", 1, LAYERS

    def __init__(self, seed: int = 0, *, pages: int = PAGES, temporal_dtype: str = "torch.float32") -> None:
        self.size = pages
        self.dtype = self.conv_dtype = "torch.bfloat16"
        self.temporal_dtype = temporal_dtype
        self.content = np.random.default_rng(seed).random((pages, 100), np.float32)

    def page(self, page: int) -> bytes:
        """What a page holds."""
        return bytes(self.content[page])

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        each = self.content[0].nbytes
        return [self.content.ctypes.data + place * each for place in indices.tolist()], [each] * len(indices)


class UnifiedRadixCache:
    """A tree with nodes of these hashes, each below the one before; node 0 is the root."""

    def __init__(self, *nodes: list[str]) -> None:
        self.nodes = ([], *nodes)
        self.tree_core = self
        self.told: list[str] | None = None
        self.storage: Any = None
        self.pool_transfers: list[PoolTransfer] = []

    def is_root(self, node: int) -> bool:
        return node == 0

    def get_hash_values(self, node: int) -> list[str]:
        return list(self.nodes[node])

    def get_prefix_hash_values(self, node: int) -> list[str]:
        return [each for above in self.nodes[:node] for each in above]

    def reset(self) -> None:
        """The pages are dropped."""

    def prefetch_from_storage(
        self,
        request: str,
        last_host_node_id: int,
        new_input_tokens: Any,
        last_hash: Any = None,
        prefix_keys: Any = None,
    ) -> None:
        self.told = prefix_keys

    def query_storage_hit_length(
        self,
        last_host_node_id: int,
        new_input_tokens: Any,
        last_hash: Any = None,
        prefix_keys: Any = None,
        extra_key: Any = None,
        cache_salt: Any = None,
    ) -> int:
        """How many of some pages are stored, asked by the scheduler. The real one gets tokens, and hashes them."""
        known = behind(*(prefix_keys or ()))
        if self.pool_transfers:
            return int(self.storage.batch_exists_v2(new_input_tokens, self.pool_transfers, known).kv_hit_pages)
        return int(self.storage.batch_exists(new_input_tokens, known))


class WeightUpdater:
    """Of a model runner. A trainer that writes weights from outside begins and ends, and does nothing else."""

    def begin_weight_update(self) -> None:
        pass

    def end_weight_update(self, *, run_post_load: bool) -> None:
        pass

    def update_weights_from_disk(self, model_path: str, load_format: str) -> tuple[bool, str]:
        return True, "done"

    def update_weights_from_ipc(self, request: Any) -> tuple[bool, str]:
        return True, "done"

    def update_weights_from_tensor(self, named_tensors: Any, load_format: str | None = None) -> tuple[bool, str]:
        raise NotImplementedError("an unknown format, after half of the tensors were loaded")

    def load_weights_from_distributed(self, named_tensors: Any) -> tuple[bool, str]:
        return False, "partially updated"


class WeightChecker:
    """Of a model runner: a check of updates, before which it has no right weights."""

    def _reset_tensors(self, skip_tensor_list: list[str] | None = None) -> None:
        """The weights are noise."""


class _TorchMemorySaverAdapterReal:
    """Memory that SGLang gives back and gets again, if it is started so."""

    def resume(self, tag: str) -> None:
        """What is in this memory is lost, unless a copy was kept."""


def resume_memory(tag: str) -> None:
    """As SGLang does for `/resume_memory_occupation`."""
    _TorchMemorySaverAdapterReal().resume(tag)


def replace_weights() -> None:
    """By a request that names a folder."""
    assert WeightUpdater().update_weights_from_disk("elsewhere", "auto") == (True, "done")


class HookRegistry:
    """Applies hooks of the kinds that are used."""

    hooks: list[tuple[type, str, Callable[..., Any], str]]

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], kind: str) -> None:
        path, name = target.rsplit(".", 1)
        cls.hooks.append((FAKES[path.rsplit(".", 1)[1]], name, hook, kind))

    @classmethod
    def apply_hooks(cls) -> None:
        for owner, name, hook, kind in cls.hooks:
            setattr(owner, name, _hooked(getattr(owner, name), hook, kind))
        cls.hooks = []


def _hooked(original: Callable[..., Any], hook: Callable[..., Any], kind: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        if kind == "before":
            args, kwargs = hook(*args, **kwargs) or (args, kwargs)
            return original(*args, **kwargs)
        if kind == "around":
            return hook(original, *args, **kwargs)
        result = original(*args, **kwargs)
        changed = hook(result, *args, **kwargs)
        return result if changed is None else changed

    return called


FAKES: dict[str, type] = {
    "UnifiedRadixCache": UnifiedRadixCache,
    "WeightChecker": WeightChecker,
    "WeightUpdater": WeightUpdater,
    "_TorchMemorySaverAdapterReal": _TorchMemorySaverAdapterReal,
}


@dataclass
class StorageConfig:
    """`HiCacheStorageConfig`, as far as it is used."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    should_split_heads: bool = False
    extra_config: dict[str, Any] | None = field(default_factory=lambda: {"interface_v1": 1})

    @property
    def is_storage_writer(self) -> bool:
        """SGLang asks before it hands a page to the storage."""
        return not self.is_mla_model or self.tp_rank == 0


@dataclass
class Parallel:
    """SGLang's ranks and sizes of a process, as far as they are used."""

    tp_rank: int = 0
    tp_size: int = 1
    attn_tp_rank: int = 0
    pp_size: int = 1
    nnodes: int = 1


class FakeSglang:
    """SGLang with one model in a folder. Change `bags` and `parallel` before a storage is made."""

    def __init__(self, model: Path) -> None:
        self.config = dict(CONFIG)
        self.version = "0.5.23"
        self.parallel = Parallel()
        self.bags = {
            "model": SimpleNamespace(
                model_path=str(model),
                revision=None,
                download_dir=None,
                load_format="auto",
                quantization=None,
                context_length=None,
                weight_loader_disable_mmap=False,
            ),
            "device": SimpleNamespace(device="cpu", random_seed=1),
            "spec": SimpleNamespace(speculative_algorithm=None),
            "memory": SimpleNamespace(
                hicache_storage_backend="dynamic",
                hicache_write_policy="write_through",
                hicache_host_memory_mode="cache",
            ),
            "disagg": SimpleNamespace(disaggregation_decode_enable_offload_kvcache=False),
            "lora": SimpleNamespace(enable_lora=True, lora_paths=[]),
            "exec": SimpleNamespace(
                moe=SimpleNamespace(kt_weight_path=None, kt_num_gpu_experts=None, kt_cpuinfer=None),
                mamba=SimpleNamespace(mamba_ssm_dtype=None),
                kernel=SimpleNamespace(
                    attention_backend="triton",
                    prefill_attention_backend=None,
                    decode_attention_backend=None,
                    enable_precise_embedding_interpolation=False,
                    sampling_backend=None,
                ),
                comm=SimpleNamespace(enable_quant_communications=False),
                features=SimpleNamespace(enable_weights_cpu_backup=False),
                deterministic=SimpleNamespace(enable_deterministic_inference=False, rl_on_policy_target=None),
            ),
            "mm": SimpleNamespace(
                mm_process_config={},
                image_processor_backend="auto",
                disable_fast_image_processor=False,
                mm_attention_backend=None,
                mm_io_worker_num=0,
            ),
            "observability": SimpleNamespace(forward_hooks=None),
        }

    def config_bag(self, name: str) -> SimpleNamespace:
        return self.bags[name]

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Let its modules be imported."""
        model_config = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: self.config), dtype="torch.float32")
        HookRegistry.hooks = []
        for fake, method in (
            (UnifiedRadixCache, "prefetch_from_storage"),
            (UnifiedRadixCache, "query_storage_hit_length"),
            (UnifiedRadixCache, "reset"),
            (WeightChecker, "_reset_tensors"),
            (_TorchMemorySaverAdapterReal, "resume"),
            *((WeightUpdater, name) for name in vars(WeightUpdater) if not name.startswith("_")),
        ):
            patch.setattr(fake, method, getattr(fake, method))  # taken back with its hooks
        modules: dict[str, dict[str, Any]] = {
            "mem_cache.hicache_storage": {"HiCacheStorage": HiCacheStorage, "PoolTransferResult": PoolTransferResult},
            "mem_cache.unified_radix_cache": {"UnifiedRadixCache": UnifiedRadixCache},
            "model_executor.model_runner_components.weight_updater": {"WeightUpdater": WeightUpdater},
            "utils.weight_checker": {"WeightChecker": WeightChecker},
            "utils.torch_memory_saver_adapter": {"_TorchMemorySaverAdapterReal": _TorchMemorySaverAdapterReal},
            "plugins.hook_registry": {
                "HookRegistry": HookRegistry,
                "HookType": SimpleNamespace(BEFORE="before", AFTER="after", AROUND="around"),
            },
            "runtime_context": {
                "get_context": lambda: self,
                "get_parallel": lambda: self.parallel,
                "process_model_config": lambda: model_config,
            },
        }
        for path, content in modules.items():
            parts = f"sglang.srt.{path}".split(".")
            for end in range(1, len(parts) + 1):
                name = ".".join(parts[:end])
                if name not in sys.modules:
                    module = ModuleType(name)
                    module.__path__ = []
                    patch.setitem(sys.modules, name, module)
                    if end > 1:
                        setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
            vars(sys.modules[f"sglang.srt.{path}"]).update(content)
