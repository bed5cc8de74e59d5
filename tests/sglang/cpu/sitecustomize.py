"""Lets SGLang 0.5.23 run on CPUs without packages for GPUs, its hierarchical cache included. Nothing of it is edited.

With this folder on PYTHONPATH, Python imports the module at its start. Then:

- packages of GPU kernels and of media are there, and whoever uses what is in them gets an error;
- the copies between SGLang's two pools, which SGLang has for GPUs only, are made by torch;
- memory is not pinned.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: Packages, and one module: the registry's torchvision is a build for CUDA, whose operators do not load.
ABSENT = frozenset({"sgl_kernel", "gguf", "soundfile", "torchvision._meta_registrations"})
_POOLS = "sglang.srt.mem_cache.pool_host"


class _AbsentType(type):
    """A class of an absent package: it has every attribute, each one such a class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(name)


def _absent(name: str) -> Any:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(f"{name} is for GPUs")

    return _AbsentType(name, (), {"__init__": refuse})


class _AbsentModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(name)


# --- copies between the pools, with SGLang's names of arguments. Tokens are [tokens, heads, dim], pages
# [pages, layers, tokens of a page, heads, dim].


def _pages(indices: Any, page_size: int) -> list[int]:
    return [int(token) // page_size for token in indices.view(-1, page_size)[:, 0]]


def copy_tokens(src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """Between layers of both pools."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def load_layer(src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int) -> None:
    """One layer of pages of the host pool."""
    rows = dst_indices.view(-1, page_size)
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        for row, page in zip(rows, _pages(src_indices, page_size), strict=True):
            device[row] = host[page, layer_id]


def save_layers(src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """All layers of tokens into pages of the host pool: first the keys of each layer, then the values."""
    layers, rows = len(src_ptrs) // len(dst_ptrs), src_indices.view(-1, page_size)
    for number, host in enumerate(dst_ptrs):
        for row, page in zip(rows, _pages(dst_indices, page_size), strict=True):
            for layer in range(layers):
                host[page, layer] = src_ptrs[number * layers + layer][row]


def _nothing(*_: object, **__: object) -> None:
    """For what needs no doing without a GPU."""


def _change_common(module: Any) -> None:
    module._cuda_host_register = module._cuda_host_unregister = _nothing


def _change_pool(module: Any) -> None:
    module._cuda_host_unregister = _nothing
    module.transfer_kv_direct = copy_tokens
    module.transfer_kv_per_layer_direct_pf_lf = load_layer
    module.transfer_kv_all_layer_direct_lf_pf = save_layers


def _change_base(module: Any) -> None:
    module.HostKVCache.pin_memory = property(lambda _: False, _nothing)


def _change_streams(module: Any) -> None:
    if not hasattr(module.Stream, "synchronize"):
        module.Stream.synchronize = _nothing


CHANGES: dict[str, Callable[[Any], None]] = {
    f"{_POOLS}.common": _change_common,
    f"{_POOLS}.mha": _change_pool,
    f"{_POOLS}.mla": _change_pool,
    f"{_POOLS}.base": _change_base,
    "torch.cpu": _change_streams,
}


class _Finder(MetaPathFinder, Loader):
    """Finds absent packages, and changes others after their import."""

    _looking = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in ABSENT or name.split(".", maxsplit=1)[0] in ABSENT:
            return ModuleSpec(name, self, is_package=True)
        change = CHANGES.get(name)
        if change is None or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _AbsentModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())
