"""Every core test ends with every invariant holding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvcached.core.cache import Cache
from tests.core.engine import healthy, make_cache
from tests.core.host_tier import make_tiers
from tests.core.offload_engine import make_offload


@pytest.fixture
def new_cache() -> Iterator[Callable[..., Cache]]:
    """Makes caches, and checks each of them when the test is over."""
    made: list[Cache] = []

    def make(slots: int = 16, names: str = "a") -> Cache:
        made.append(make_cache(slots, names))
        return made[-1]

    yield make
    assert all(healthy(cache) for cache in made)


@pytest.fixture
def cache(new_cache: Callable[..., Cache]) -> Cache:
    """A cache with one pool "a" of 16 slots."""
    return new_cache()


@pytest.fixture
def new_tiers() -> Iterator[Callable[..., Cache]]:
    """Makes caches with a host pool, and checks each of them when the test is over."""
    made: list[Cache] = []

    def make(names: str = "a", **settings: Any) -> Cache:
        made.append(make_tiers(names, **settings))
        return made[-1]

    yield make
    assert all(healthy(cache) for cache in made)


@pytest.fixture
def new_offload() -> Iterator[Callable[..., Cache]]:
    """Makes caches for engines in offload mode, and checks each of them when the test is over."""
    made: list[Cache] = []

    def make(**settings: Any) -> Cache:
        made.append(make_offload(**settings))
        return made[-1]

    yield make
    assert all(healthy(cache) for cache in made)
