"""Pools that a model has beside keys and values, as SGLang's calls of version 2 name them.

- Of some, a prompt needs every page, as of keys and values: these are stored as chains.
- Of others, SGLang stores the pages before the end of a node of its tree, and a prompt needs the last ones of its hit:
  a sliding window, or one state. Pages before them may be missing for good, so that each is a chain of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from kvcached_client.sglang.page_store import Chain, PageStore, Patience, chain_of

#: SGLang is untyped here: its `PoolTransfer`, by name, policy, hashes of pages, and tokens in the host pool.
PoolTransfer: TypeAlias = Any

_TRAILING: Final = "trailing_pages"
#: `PageStore.load` or `PageStore.store`.
_Copy: TypeAlias = Callable[[PageStore, Chain, Sequence[int]], int]


class SidePool(NamedTuple):
    """A pool.

    Attributes:
        pages: in the daemon.
        page_size: tokens in a page of SGLang's host pool.
    """

    pages: PageStore
    page_size: int


class Hit(NamedTuple):
    """What is stored of a prompt.

    Attributes:
        pages: how many pages can be used.
        by_pool: how many there are of each pool, at least that many; a pool of which nothing is found is left out.
        ends: at how many pages a prompt may end to be used, in order.
    """

    pages: int
    by_pool: dict[str, int]
    ends: list[int]


class SidePools:
    """The pools of one SGLang process beside keys and values.

    Args:
        is_alone: whether no other rank has to agree on where a hit ends.
    """

    def __init__(self, *, is_alone: bool) -> None:
        self._is_alone = is_alone
        self._pools: dict[str, SidePool] = {}

    def add(self, name: str, pool: SidePool) -> None:
        """Serve a pool; the one of that name before it is closed."""
        if name in self._pools:
            self._pools[name].pages.close()
        self._pools[name] = pool

    def clear(self) -> bool:
        """Have no engine find what is stored; as `PageStore.clear`."""
        told = [pool.pages.clear() for pool in self._pools.values()]
        return all(told)

    def close(self) -> None:
        """End the sessions."""
        for pool in self._pools.values():
            pool.pages.close()
        self._pools.clear()

    def hit(self, chain: Chain, found: int, transfers: Iterable[PoolTransfer], patience: Patience) -> Hit:
        """How much of a chain can be used of which so many pages of keys and values are found."""
        ends, by_pool = list(range(1, found + 1)), dict[str, int]()
        ordered = sorted(transfers, key=_is_trailing)
        every = not self._is_alone or sum(map(_is_trailing, ordered)) > 1
        for transfer in ordered:
            pool = self._pools.get(_name(transfer))
            if pool is None or not ends:
                return Hit(0, by_pool, [])
            usable = Chain(chain.part(0, chain.prefix + ends[-1]), chain.prefix)
            there = set(_ends(pool.pages, usable, transfer, patience, every=every))
            if there:
                by_pool[_name(transfer)] = max(there)
            ends = [end for end in ends if end in there]
        return Hit(max(ends, default=0), by_pool, ends)

    def load(self, transfers: Iterable[PoolTransfer], prefix: Sequence[str]) -> dict[str, list[bool]]:
        """Copy pages into SGLang's host pools: for each of a pool's whether it is there."""
        return {_name(each): self._copied(PageStore.load, each, prefix) for each in transfers}

    def store(self, transfers: Iterable[PoolTransfer], prefix: Sequence[str]) -> dict[str, list[bool]]:
        """Copy pages from SGLang's host pools: for each of a pool's whether it is stored."""
        return {_name(each): self._copied(PageStore.store, each, prefix) for each in transfers}

    def _copied(self, copy: _Copy, transfer: PoolTransfer, prefix: Sequence[str]) -> list[bool]:
        pool, keys = self._pools.get(_name(transfer)), transfer.keys or []
        places = None if pool is None else places_of(transfer.host_indices, pool.page_size)
        if pool is None or places is None or len(places) != len(keys):
            return [False] * len(keys)
        if not _is_trailing(transfer):
            done = copy(pool.pages, chain_of(prefix, keys), places)
            return [number < done for number in range(len(keys))]
        alone = chain_of((), keys)
        return [
            copy(pool.pages, Chain(alone.part(number, number + 1), 0), [place]) == 1
            for number, place in enumerate(places)
        ]


def places_of(host_indices: Any, page_size: int) -> list[int]:  # noqa: ANN401 - a tensor
    """Numbers of the pages that hold these tokens; none for no tensor."""
    return [] if host_indices is None else [token // page_size for token in host_indices[::page_size].tolist()]


def _ends(pages: PageStore, chain: Chain, transfer: PoolTransfer, patience: Patience, *, every: bool) -> Sequence[int]:
    """At how many pages a chain may end for one pool."""
    if _is_trailing(transfer):
        window = max(len(transfer.keys or ()), 1)
        return pages.ends(chain.part(chain.prefix, chain.pages), window, patience, every=every)
    return range(1, pages.found(chain, patience) + 1)


def _name(transfer: PoolTransfer) -> str:
    return str(transfer.name)


def _is_trailing(transfer: PoolTransfer) -> bool:
    return bool(transfer.hit_policy == _TRAILING)
