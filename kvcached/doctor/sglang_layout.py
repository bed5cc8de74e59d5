"""SGLang's pages against the daemon's host pool: how large a page will be, and whether there is room for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, get_args

from kvcached.doctor.model_config import read_config, text_config
from kvcached.doctor.sglang_flags import SglangFlags
from kvcached_client.blocks.host_layout import slots_per_slab, smallest_slab
from kvcached_client.blocks.layout import DType, Layout, layout_from_model_config
from kvcached_client.doctor.checks import Finding
from kvcached_client.errors import RequestError
from kvcached_client.protocol.engine import OffloadInfo

_CHECK: Final = "layout"
_PAGE_SIZE: Final = "page-size"
#: Of most of SGLang's attention backends; some take another one by themselves.
_DEFAULT_PAGE_SIZE: Final = 1
_GOOD_PAGE_SIZE: Final = 64
_AUTO: Final = "auto"
#: SGLang's other names of element types.
_NAMED: Final = {
    "half": "float16",
    "float": "float32",
    "bf16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
_BY_HAND: Final = "compare it by hand: docs/configuration.md"


def check_layout(model: str, flags: SglangFlags, offered: OffloadInfo) -> Iterator[Finding]:
    """Whether a slab of the host pool holds a page of the model, and the host pool a slab for each rank.

    Args:
        model: folder of a model, or its config.json; a name of the hub is not looked up.
        flags: SGLang's arguments, for the sizes in them.
        offered: what the daemon has.
    """
    if _PAGE_SIZE not in flags.options:
        text = f"--page-size is missing: with most attention backends a page has {_DEFAULT_PAGE_SIZE} token"
        yield Finding(_CHECK, "warn", f"{text}, and each page is a block", f"add --page-size {_GOOD_PAGE_SIZE}")
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        text = f"{model} is neither a folder nor a config.json here: pages are not compared with the slabs"
        yield Finding(_CHECK, "warn", text, "name the folder of the model: --model DIR")
        return
    try:
        layout = page_layout(read_config(model), flags)
    except (RequestError, ValueError, OSError, AttributeError) as error:
        yield Finding(_CHECK, "warn", f"{path} does not tell the size of a page: {error}", _BY_HAND)
        return
    yield from _compare(layout, flags, offered)


def page_layout(config: Mapping[str, Any], flags: SglangFlags) -> Layout:
    """The page of one rank, that of the rank with the most layers.

    Raises:
        RequestError, ValueError: the arguments or the configuration do not tell it.
    """
    page_size = int(flags.options.get(_PAGE_SIZE) or _DEFAULT_PAGE_SIZE)
    text = text_config(config)
    dtype = _dtype(flags, config)
    whole = layout_from_model_config(dict(text), block_size=page_size, shards=flags.head_ranks, kv_dtype=dtype)
    (group,) = whole.groups
    stage = {**text, "num_hidden_layers": -(-group.layers // flags.stages)}
    return layout_from_model_config(stage, block_size=page_size, shards=flags.head_ranks, kv_dtype=dtype)


def _compare(layout: Layout, flags: SglangFlags, offered: OffloadInfo) -> Iterator[Finding]:
    """Each rank is an engine of its own, with one shard."""
    size = layout.bytes_per_block()
    slots = slots_per_slab(offered.slab_bytes, size, 1)
    words = f"a page of {layout.block_size} tokens takes {size} bytes on each of {flags.ranks} ranks"
    if not slots:
        least = f"set slab_bytes in the daemon's [host] table to {smallest_slab(size, 1)} or more"
        fix = f"{least}, or give SGLang a smaller --page-size"
        yield Finding(_CHECK, "fail", f"{words}: a slab of {offered.slab_bytes} bytes holds none", fix)
    elif flags.ranks > offered.slabs:
        text = f"{words}, and each rank takes a slab at least: the host pool has {offered.slabs}"
        fix = "give the daemon's [host] table a larger size_bytes, or a smaller slab_bytes"
        yield Finding(_CHECK, "fail", text, fix)
    else:
        yield Finding(_CHECK, "ok", f"{words}; {slots} of them in a slab of {offered.slab_bytes} bytes")


def _dtype(flags: SglangFlags, config: Mapping[str, Any]) -> DType:
    """Element type of the cache. By itself SGLang halves models in float32, which one without a type counts as.

    Raises:
        ValueError: it is one whose pages have more than elements.
    """
    text = text_config(config)
    by_model = [each[name] for each in (text, config) for name in ("dtype", "torch_dtype") if each.get(name)]
    wanted = [flags.options.get(option, _AUTO) for option in ("kv-cache-dtype", "dtype")]
    value = next((each for each in wanted if each != _AUTO), None) or next(iter(by_model), "float32")
    if value == "float32" and set(wanted) == {_AUTO}:
        value = "bfloat16" if str(text.get("model_type", "")).startswith("gemma") else "float16"
    for dtype in get_args(DType):
        if _NAMED.get(value, value) == dtype:
            return dtype  # type: ignore[no-any-return]
    raise ValueError(f"the type {value} is not read here")
