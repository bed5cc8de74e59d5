"""The storage that SGLang loads: its calls, in SGLang's threads, answered from the daemon's host pool.

SGLang has one of these in each of its scheduler processes, one for each rank. Each is an engine of its own for the
daemon: SGLang itself lets all ranks use what all of them have found.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from typing import Final

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult
from sglang.srt.runtime_context import get_context, get_parallel, process_model_config

from kvcached_client.engines.one_process import EngineIdentity, OneProcessEngine, Silence
from kvcached_client.engines.weights import WeightReader, default_notes_folder, find_snapshot
from kvcached_client.sglang import hooks
from kvcached_client.sglang.clears import OwedClears, Pools
from kvcached_client.sglang.host_pages import SERVED_POOLS, SIDE_POOLS, pages_of
from kvcached_client.sglang.identity import (
    SglangObject,
    described,
    part_label_of,
    part_of,
    pool_keyspace,
    ranks_of,
)
from kvcached_client.sglang.page_store import Chain, PageStore, Patience, chain_of
from kvcached_client.sglang.settings import OPTION, REFUSED_SETTINGS, TESTED_VERSION, read_settings
from kvcached_client.sglang.side_pools import SidePool, SidePools, places_of
from kvcached_client.sglang.writers import have_pages_stored

#: The pool that every model has; others are beside it.
_POOL: Final = "kv"
#: Pools of which each tensor-parallel rank has another part, whatever the attention.
_RANK_POOLS: Final = frozenset({"mamba"})
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
        have_pages_stored(storage_config, get_parallel())
        self._settings = read_settings(storage_config.extra_config)
        self._config = storage_config
        self._model = described(get_context(), process_model_config(), version("sglang"))
        self._part = part_of(storage_config)
        self._is_attached_late = _is_attached_late()
        self._weights = hooks.install(is_attached_late=self._is_attached_late)
        self._keyspace, self._is_secret = b"", False
        if not self._weights.replacements:
            self._keyspace = self._shared_keyspace()
        self._replacements = self._weights.replacements  # after so many the keyspace was taken
        if self._replacements:
            self._take_secret_keyspace()
        self._pages: PageStore | None = None
        self._side_pools = self._no_side_pools()
        self._turn = threading.Lock()
        self._calls = 0  # under way
        self._closing: list[Callable[[], None]] = []  # when no call is under way
        self._knows_prefixes, self._has_told_promises = True, False
        self._owed_clears = OwedClears()
        self._silence = Silence()
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
        with self._turn:
            self._pages = self._connected(_POOL, mem_pool_host, SERVED_POOLS)

    def register_mem_host_pool_v2(self, host_pool: SglangObject, host_pool_name: str) -> None:
        """Use a host pool beside that of keys and values, too.

        SGLang does not close a storage that refuses a pool, and takes it for attached.

        Raises:
            ValueError: its pages cannot be served.
        """
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != _POOL:
            with self._turn:
                try:
                    self._add_side_pool(str(host_pool_name), host_pool)
                except ValueError as error:
                    self._leave_pools()
                    again = "; detach the storage before attaching it again" if self._is_attached_late else ""
                    raise ValueError(f"{error}{again}") from error

    # --- SGLang's calls -----------------------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: SglangObject = None) -> int:
        """How many of these pages are stored, from the first on."""
        if self._is_promise():
            return 0
        with self._in_use() as (pages, _):
            return pages.found(self._chain(keys, extra_info), Patience()) if pages else 0

    def batch_get_v1(self, keys: list[str], host_indices: SglangObject, extra_info: SglangObject = None) -> list[bool]:
        """Copy pages into SGLang's host pool: for each whether it is there."""
        loaded = 0
        with self._in_use() as (pages, _):
            if pages:
                loaded = pages.load(self._chain(keys, extra_info), self._places(host_indices))
        return [number < loaded for number in range(len(keys))]

    def batch_set_v1(self, keys: list[str], host_indices: SglangObject, extra_info: SglangObject = None) -> list[bool]:
        """Copy pages from SGLang's host pool: for each whether it is stored."""
        stored = 0
        with self._in_use() as (pages, _):
            if pages and self._is_told_prefixes(extra_info):
                stored = pages.store(self._chain(keys, extra_info), self._places(host_indices))
        return [number < stored for number in range(len(keys))]

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[SglangObject] | None = None, extra_info: SglangObject = None
    ) -> PoolTransferResult:
        """How many of these pages are stored, from the first on, with what the other pools need for them."""
        if self._is_promise():
            return PoolTransferResult(0, {})
        chain, patience = self._chain(keys, extra_info), Patience()
        with self._in_use() as (pages, side_pools):
            found = pages.found(chain, patience) if pages else 0
            hit = side_pools.hit(chain, found, pool_transfers or (), patience)
        return PoolTransferResult(hit.pages, ({_POOL: found} if found else {}) | hit.by_pool, hit.ends)

    def batch_get_v2(self, transfers: list[SglangObject], extra_info: SglangObject = None) -> dict[str, list[bool]]:
        """Copy pages into SGLang's other host pools: for each whether it is there."""
        with self._in_use() as (_, side_pools):
            return side_pools.load(transfers, _prefix(extra_info))

    def batch_set_v2(self, transfers: list[SglangObject], extra_info: SglangObject = None) -> dict[str, list[bool]]:
        """Copy pages from SGLang's other host pools: for each whether it is stored."""
        if not self._is_told_prefixes(extra_info):
            return {str(each.name): [False] * len(each.keys or ()) for each in transfers}
        with self._in_use() as (_, side_pools):
            return side_pools.store(transfers, _prefix(extra_info))

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
        """Have no engine with this model find what is stored now.

        SGLang reports that as done, whatever becomes of it. So a daemon that cannot be told is told later. After a
        refusal this SGLang finds nothing from before, either: it goes on as after a replacement of weights.
        """
        with self._turn:
            if (pools := self._pools) is not None:
                self._owed_clears.add(pools)
                self._catch_up()
            is_owed = self._pools in self._owed_clears
        if is_owed:
            _log.warning(
                "kvcached: nothing is cleared yet, because the daemon does not answer: this SGLang finds nothing until "
                "it does, and clears then; other engines find what is stored until then"
            )

    def close(self) -> None:
        """End the session; what is stored stays, unless the weights were replaced, so that nobody can find it."""
        with self._turn:
            self._make_up_clears()
            self._leave_pools()
            self._closing += [pools.close for pools in self._owed_clears.give_up()]
            self._close_left()

    # --- inside -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[tuple[PageStore | None, SidePools]]:
        """The pages of the weights that are in memory now, for one call; none without a pool, or when closed."""
        with self._turn:
            self._catch_up()
            self._calls += 1
            is_owed = self._pools in self._owed_clears
            in_use = (None, self._no_side_pools()) if is_owed else (self._pages, self._side_pools)
        try:
            yield in_use
        finally:
            with self._turn:
                self._calls -= 1
                self._close_left()

    @property
    def _pools(self) -> Pools | None:
        return None if self._pages is None else Pools(self._pages, self._side_pools)

    def _catch_up(self) -> None:
        """Tell the daemon what it could not be told before, and take notice of other weights."""
        self._make_up_clears()
        if self._pages is not None and self._replacements != self._weights.replacements:
            self._forget_weights()

    def _make_up_clears(self) -> None:
        for pools, is_refused in self._owed_clears.make_up():
            if pools != self._pools:
                self._closing.append(pools.close)
            elif is_refused:
                self._weights.replaced("the daemon refuses to clear")  # counts also when the storage is attached again
        self._close_left()

    def _forget_weights(self) -> None:
        """Weights in memory may be others: find nothing of before, and share nothing with anybody from now on.

        The pages of weights that were replaced as well are cleared. That is not enough if the daemon does not confirm
        it, or if a call is under way, which might store one of them later: then others take their place.
        """
        replacements = self._weights.replacements
        if not ((pools := self._pools) and self._is_secret and not self._calls and pools.is_cleared()):
            self._leave_pools()
            self._take_secret_keyspace()
            self._pages = self._connected(_POOL, self.mem_pool_host, SERVED_POOLS)
            for name, pool in getattr(self, "registered_pools", {}).items():
                if str(name) != _POOL:
                    self._add_side_pool(str(name), pool)
        self._replacements = replacements

    def _leave_pools(self) -> None:
        """Have none from now on; calls that are under way end in the present ones.

        Those of which a clear is owed stay open until it is made. Nobody else can have pages of a secret keyspace, so
        those are cleared when they are closed.
        """
        pools = self._pools
        if pools is None:
            self._closing.append(self._side_pools.close)
        elif self._is_secret:
            self._owed_clears.drop(pools)
            self._closing.append(pools.discard)
        elif pools not in self._owed_clears:
            self._closing.append(pools.close)
        self._pages, self._side_pools = None, self._no_side_pools()
        self._close_left()

    def _close_left(self) -> None:
        while self._closing and not self._calls:
            self._closing.pop()()

    def _no_side_pools(self) -> SidePools:
        return SidePools(is_alone=ranks_of(self._config) == 1)

    def _shared_keyspace(self) -> bytes:
        """The keyspace of the weight files, which are read unless their digests are remembered."""
        content = partial(
            self._weights.content,
            reader=WeightReader(default_notes_folder(), log=_log),
            find_snapshot=find_snapshot,
        )
        return self._model.keyspace(self._part, weights_version=self._settings.weights_version, content=content)

    def _take_secret_keyspace(self) -> None:
        level = logging.DEBUG if self._is_secret else logging.WARNING
        _log.log(level, "kvcached: %s: until SGLang starts again, nothing is shared with others", self._weights.why)
        self._keyspace, self._is_secret = os.urandom(_SECRET_BYTES), True

    def _add_side_pool(self, name: str, pool: SglangObject) -> None:
        if not self._settings.side_pools:
            raise ValueError(
                f"this model has a host pool {name!r} beside that of keys and values, and nobody has proven yet that "
                "hits of such models come to the right output: compare outputs on your device, then add "
                f'"kvcached": {{"side_pools": true}} to {OPTION}; or use no kvcached'
            )
        pages = self._connected(name, pool, SIDE_POOLS.get(name, frozenset()))
        self._side_pools.add(name, SidePool(pages, pool.page_size))

    def _connected(self, name: str, pool: SglangObject, served: Collection[str]) -> PageStore:
        """Pages of the model in one of SGLang's host pools. Whether the daemon is there is logged now."""
        page_size, pages = pool.page_size, pages_of(pool, served)
        label = self._model.label(part_label_of(self._config) + ("" if name == _POOL else f" {name}"))
        keyspace = self._keyspace if name == _POOL else pool_keyspace(self._keyspace, name, self._rank_of(name))
        identity = EngineIdentity(f"sglang {self._model.version}", keyspace, label, page_size)
        finder, copier = (
            OneProcessEngine(
                identity,
                pages,
                run_dir=self._settings.run_dir,
                deadline_ms=self._settings.deadline_ms,
                log=_log,
                silence=self._silence,
            )
            for _ in range(2)
        )
        store = PageStore(finder, copier, page_size)
        store.connect()
        return store

    def _rank_of(self, name: str) -> int:
        """States are each rank's own, also where all ranks hold the same keys and values."""
        return self._config.tp_rank if name in _RANK_POOLS else 0

    def _chain(self, keys: Sequence[str], extra_info: SglangObject) -> Chain:
        return chain_of(_prefix(extra_info), keys)

    def _places(self, host_indices: SglangObject) -> list[int]:
        return places_of(host_indices, self.mem_pool_host.page_size)

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

    def _is_promise(self) -> bool:
        """Whether SGLang would promise what is found to another SGLang, which then does not send it.

        A page may be evicted, cleared, or found damaged until it is loaded, or the daemon may end. SGLang would end
        the request then, so nothing is found.
        """
        is_promise = hooks.is_scheduler_asking()
        if is_promise and not self._has_told_promises:
            self._has_told_promises = True
            _log.warning(
                "kvcached stores pages here, but finds none: with --disaggregation-decode-enable-radix-cache, SGLang "
                "ends a request of which a page that was found cannot be loaded"
            )
        return is_promise


def _prefix(extra_info: SglangObject) -> Sequence[str]:
    """Hashes of the pages before those that a call is about."""
    return getattr(extra_info, "prefix_keys", None) or ()


def _is_attached_late() -> bool:
    """Whether SGLang has run without a storage until now. It notes the one that it attaches when that is done."""
    return get_context().config_bag("memory").hicache_storage_backend is None


def _check(config: SglangObject) -> None:
    """Raise ValueError if SGLang is set up in a way that does not work."""
    if not (config.extra_config or {}).get("interface_v1"):
        raise ValueError(f'add "interface_v1": 1 to {OPTION}')
    if config.should_split_heads:
        raise ValueError("tp_lcm_size is not served: leave it out")
    for setting in REFUSED_SETTINGS:
        if setting.is_meant(getattr(get_context().config_bag(setting.group), setting.name, None)):
            raise ValueError(f"{setting.words}: leave out {setting.option}")
