"""The pages of SGLang's host pool, as blocks that the daemon's host pool has copies of."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from kvcached_client.blocks.pages import EnginePages, LayerPages

#: SGLang is untyped here.
HostPool: TypeAlias = Any

#: Pools whose pages are whole: keys and values of all layers, and nothing beside.
SERVED_POOLS: Final = frozenset({"MHATokenToKVPoolHost", "AsymmetricMHATokenToKVPoolHost", "MLATokenToKVPoolHost"})
#: Pools that may be there beside that of keys and values, by SGLang's names for what is in them: keys and values of
#: layers with a sliding window, states, keys of an indexer.
SIDE_POOLS: Final[Mapping[str, frozenset[str]]] = {
    "swa": SERVED_POOLS,
    "mamba": frozenset({"MambaPoolHost"}),
    "indexer": frozenset({"DSAIndexerPoolHost", "MHATokenToKOnlyPoolHost"}),
}
#: Layouts with more in a page than `get_page_buffer_meta` is known to tell.
SERVED_LAYOUTS: Final = frozenset({"layer_first", "page_first", "page_first_direct"})
#: What is said of a pool beside the sizes of a page's parts. A pool of states has the `dtype` of its convolutions.
_DESCRIBED: Final = (
    "layout",
    "dtype",
    "page_size",
    "layer_num",
    "start_layer",
    "end_layer",
    "storage_format_tag",
    "temporal_dtype",
    "temporal_state_shape",
    "conv_dtype",
    "conv_state_shapes",
)
#: Order of a token's heads in SGLang's pool on the device, unless it says otherwise.
_DEVICE_LAYOUT: Final = "nhd"
#: The first pages and the last show where all others are.
_PAGES_MIN: Final = 3


def pages_of(pool: HostPool, served: Collection[str] = SERVED_POOLS) -> EnginePages:
    """The pages of a host pool, where SGLang says that they are.

    Args:
        pool: SGLang's.
        served: the kinds that it may be of.

    Raises:
        ValueError: they cannot be served, and why.
    """
    kind = type(pool).__name__
    if kind not in served:
        raise ValueError(f"SGLang's {kind} is not served here: {', '.join(sorted(served)) or 'no pool'} would be")
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
    if device_layouts := _device_layouts(pool):
        described.append(device_layouts)
    digest = hashlib.blake2b(msgspec.json.encode(described), digest_size=16, person=b"kvcached sglang1")
    return EnginePages(layers, count, digest.digest(), owners=(pool,))


def _device_layouts(pool: HostPool) -> list[str]:
    """How pages are laid out on the device, none if as always: SGLang copies their rows into the host pool as they are.

    So pages of other layouts have the same sizes here, and other numbers in each place.
    """
    infos = getattr(pool, "_buffer_infos", ())
    layouts = {str(info.buffers.layout.value) for info in infos}
    return sorted(layouts - {_DEVICE_LAYOUT})


def _parts(pool: HostPool, page: int) -> tuple[list[int], list[int]]:
    """Addresses and sizes of a page's parts.

    Raises:
        ValueError: SGLang does not tell them.
    """
    try:
        addresses, sizes = pool.get_page_buffer_meta(np.arange(page * pool.page_size, (page + 1) * pool.page_size))
    except NotImplementedError as error:
        raise ValueError(f"SGLang's {type(pool).__name__} is not served: {error}") from error
    return [int(address) for address in addresses], [int(size) for size in sizes]
