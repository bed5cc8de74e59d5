"""The pages of SGLang's host pool, as blocks that the daemon's host pool has copies of."""

from __future__ import annotations

import hashlib
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from kvcached_client.blocks.pages import EnginePages, LayerPages

#: SGLang is untyped here.
HostPool: TypeAlias = Any

#: Pools whose pages are whole: keys and values of all layers, and nothing beside.
SERVED_POOLS: Final = frozenset({"MHATokenToKVPoolHost", "AsymmetricMHATokenToKVPoolHost", "MLATokenToKVPoolHost"})
#: Layouts with more in a page than `get_page_buffer_meta` is known to tell.
SERVED_LAYOUTS: Final = frozenset({"layer_first", "page_first", "page_first_direct"})
#: What is said of a pool beside the sizes of a page's parts.
_DESCRIBED: Final = ("layout", "dtype", "page_size", "layer_num", "start_layer", "end_layer", "storage_format_tag")
#: The first pages and the last show where all others are.
_PAGES_MIN: Final = 3


def pages_of(pool: HostPool) -> EnginePages:
    """The pages of a host pool, where SGLang says that they are.

    Raises:
        ValueError: they cannot be served, and why.
    """
    kind = type(pool).__name__
    if kind not in SERVED_POOLS:
        raise ValueError(f"SGLang's {kind} is not served: models with full or with latent attention are")
    if pool.layout not in SERVED_LAYOUTS:
        raise ValueError(
            f"--hicache-mem-layout {pool.layout} is not served: use {', '.join(sorted(SERVED_LAYOUTS - {pool.layout}))}"
        )
    count = pool.size // pool.page_size
    if count < _PAGES_MIN:
        raise ValueError(f"a host pool of {count} pages is too small: give --hicache-ratio or --hicache-size")
    (first, sizes), (second, _), (last, _) = (_parts(pool, page) for page in (0, 1, count - 1))
    strides = [after - before for before, after in zip(first, second, strict=True)]
    ends = [address + (count - 1) * stride for address, stride in zip(first, strides, strict=True)]
    if ends != last or any(stride < size for stride, size in zip(strides, sizes, strict=True)):
        raise ValueError(f"the pages of SGLang's {kind} in layout {pool.layout} are not at equal distances")
    layers = tuple(map(LayerPages, first, sizes, strides))
    described = [kind, *(str(getattr(pool, name, None)) for name in _DESCRIBED), sizes]
    digest = hashlib.blake2b(msgspec.json.encode(described), digest_size=16, person=b"kvcached sglang1")
    return EnginePages(layers, count, digest.digest(), owners=(pool,))


def _parts(pool: HostPool, page: int) -> tuple[list[int], list[int]]:
    """Addresses and sizes of a page's parts."""
    addresses, sizes = pool.get_page_buffer_meta(np.arange(page * pool.page_size, (page + 1) * pool.page_size))
    return [int(address) for address in addresses], [int(size) for size in sizes]
