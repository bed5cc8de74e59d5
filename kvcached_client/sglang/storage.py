"""The storage that SGLang loads: its calls, in SGLang's threads, answered from the daemon's host pool.

SGLang has one of these in each of its scheduler processes, one for each rank. Each is an engine of its own for the
daemon: SGLang itself lets all ranks use what all of them have found.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, Final, TypeAlias

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.srt.runtime_context import get_context, process_model_config

from kvcached_client.engines.one_process import EngineIdentity, OneProcessEngine
from kvcached_client.engines.weights import WeightReader, default_notes_folder, find_snapshot
from kvcached_client.sglang import hooks
from kvcached_client.sglang.host_pages import pages_of
from kvcached_client.sglang.identity import ModelDescription
from kvcached_client.sglang.page_store import Chain, PageStore, chain_of
from kvcached_client.sglang.settings import OPTION, TESTED_VERSION, read_settings

#: SGLang is untyped here.
SglangObject: TypeAlias = Any

#: The pool that a model with full or latent attention has; others are beside it.
_POOL: Final = "kv"
_SECRET_BYTES: Final = 32
_log: Final = logging.getLogger("sglang.kvcached")


class KvcachedStorage(HiCacheStorage):  # type: ignore[misc]
    """SGLang's storage in the host pool of a kvcached daemon on the same machine."""

    def __init__(self, storage_config: SglangObject, _: object = None) -> None:
        """Check the configuration and identify the model. The daemon is contacted when SGLang's host pool is there.

        Raises:
            ValueError: kvcached cannot be used with this configuration, and what to change.
        """
        _check(storage_config)
        self._settings = read_settings(storage_config.extra_config)
        self._config = storage_config
        self._model = _described()
        self._part = _part_of(storage_config)
        self._keyspace = self._model.keyspace(
            self._part,
            weights_version=self._settings.weights_version,
            reader=WeightReader(default_notes_folder(), log=_log),
            find_snapshot=find_snapshot,
        )
        self._pages: PageStore | None = None
        self._knows_prefixes = True
        hooks.install(self._forget_weights)
        if self._model.version != TESTED_VERSION:
            _log.warning(
                "kvcached: this is SGLang %s, and was tested with %s: compare outputs",
                self._model.version,
                TESTED_VERSION,
            )

    # --- SGLang's host pool -------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: SglangObject) -> None:
        """Use a host pool: pages are copied between it and the daemon's.

        Raises:
            ValueError: its pages cannot be served.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._pages = self._connected()

    def on_host_pools_registered(self) -> None:
        """Refuse models with state beside their keys and values.

        Raises:
            ValueError: there are other pools.
        """
        others = sorted({str(name) for name in getattr(self, "registered_pools", {})} - {_POOL})
        if others:
            raise ValueError(
                f"this model has pools {', '.join(others)} beside its keys and values: kvcached serves models whose "
                "layers all have full or latent attention"
            )

    # --- SGLang's calls -----------------------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: SglangObject = None) -> int:
        """How many of these pages are stored, from the first on."""
        return self._pages.found(self._chain(keys, extra_info)) if self._pages else 0

    def batch_get_v1(self, keys: list[str], host_indices: SglangObject, extra_info: SglangObject = None) -> list[bool]:
        """Copy pages into SGLang's host pool: for each whether it is there."""
        loaded = 0
        if self._pages:
            loaded = self._pages.load(self._chain(keys, extra_info), self._places(host_indices))
        return [number < loaded for number in range(len(keys))]

    def batch_set_v1(self, keys: list[str], host_indices: SglangObject, extra_info: SglangObject = None) -> list[bool]:
        """Copy pages from SGLang's host pool: for each whether it is stored."""
        stored = 0
        if self._pages and self._is_told_prefixes(extra_info):
            stored = self._pages.store(self._chain(keys, extra_info), self._places(host_indices))
        return [number < stored for number in range(len(keys))]

    def get(self, *_: object, **__: object) -> None:
        """Nothing: `batch_get_v1` finds pages."""

    def batch_get(self, keys: list[str], *_: object, **__: object) -> list[None]:
        """Nothing: `batch_get_v1` finds pages."""
        return [None] * len(keys)

    def set(self, *_: object, **__: object) -> bool:
        """Nothing: `batch_set_v1` stores pages."""
        return False

    def batch_set(self, *_: object, **__: object) -> bool:
        """Nothing: `batch_set_v1` stores pages."""
        return False

    def exists(self, key: str) -> bool:
        """Whether a page is stored that begins a prompt."""
        return bool(self.batch_exists([key]))

    def clear(self) -> None:
        """Have no engine with this model find what is stored now."""
        if self._pages is not None and not self._pages.clear():
            _log.warning("kvcached: nothing was cleared, the daemon does not answer")

    def close(self) -> None:
        """End the session; what is stored stays."""
        if self._pages is not None:
            self._pages.close()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _connected(self) -> PageStore:
        """Pages of the model in SGLang's host pool. Whether the daemon is there is logged now."""
        page_size, pages = self.mem_pool_host.page_size, pages_of(self.mem_pool_host)
        label = self._model.label(f"tp{self._config.tp_size}")
        identity = EngineIdentity(f"sglang {self._model.version}", self._keyspace, label, page_size)
        finder, copier = (
            OneProcessEngine(
                identity, pages, run_dir=self._settings.run_dir, deadline_ms=self._settings.deadline_ms, log=_log
            )
            for _ in range(2)
        )
        store = PageStore(finder, copier, page_size)
        store.connect()
        return store

    def _forget_weights(self) -> None:
        """Weights in memory are no longer those of the files: share nothing with anybody from now on."""
        _log.warning(
            "kvcached: weights were replaced in memory: until SGLang starts again, nothing is shared with others"
        )
        self._keyspace = os.urandom(_SECRET_BYTES)
        if self._pages is not None:
            earlier, self._pages = self._pages, self._connected()
            earlier.close()

    def _chain(self, keys: Sequence[str], extra_info: SglangObject) -> Chain:
        return chain_of(getattr(extra_info, "prefix_keys", None) or (), keys)

    def _places(self, host_indices: SglangObject) -> list[int]:
        """Numbers of the pages that hold these tokens."""
        size = self.mem_pool_host.page_size
        return [token // size for token in host_indices[::size].tolist()]

    def _is_told_prefixes(self, extra_info: SglangObject) -> bool:
        """Whether SGLang says what is before the pages; it says None if it was not told to say it."""
        is_told = getattr(extra_info, "prefix_keys", None) is not None
        if not is_told and self._knows_prefixes:
            self._knows_prefixes = False
            _log.error(
                "kvcached stores nothing, because SGLang does not say which pages are before those that it stores: add "
                '"hicache_storage_pass_prefix_keys": true to --hicache-storage-backend-extra-config'
            )
        return is_told


def _check(config: SglangObject) -> None:
    """Raise ValueError if SGLang is set up in a way that does not work."""
    if not (config.extra_config or {}).get("interface_v1"):
        raise ValueError(f'add "interface_v1": 1 to {OPTION}')
    if config.should_split_heads:
        raise ValueError("tp_lcm_size is not served: leave it out")
    if get_context().config_bag("spec").speculative_algorithm is not None:
        raise ValueError("speculative decoding is not served: leave out --speculative-algorithm")


def _described() -> ModelDescription:
    """The model that this process has loaded."""
    settings = vars(get_context().config_bag("model"))
    model, device = process_model_config(), get_context().config_bag("device")
    return ModelDescription(
        settings={name: value for name, value in settings.items() if not name.startswith("_")},
        config=model.hf_config.to_dict(),
        dtype=str(model.dtype).removeprefix("torch."),
        device=device.device,
        seed=device.random_seed,
        version=version("sglang"),
    )


def _part_of(config: SglangObject) -> list[object]:
    """Which part of all layers and heads this process holds."""
    context = [config.pp_rank, config.pp_size, config.attn_cp_rank, config.attn_cp_size]
    return [*context, *([] if config.is_mla_model else [config.tp_rank, config.tp_size])]
