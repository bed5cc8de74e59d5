"""vLLM's blocks against the daemon's host pool: how large a block will be, and whether there is room for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, get_args

from kvcached.doctor.model_config import read_config, text_config
from kvcached.doctor.vllm_flags import ATTENTION_LAYERS, VllmFlags
from kvcached_client.blocks.host_layout import slots_per_slab, smallest_slab
from kvcached_client.blocks.layout import DType, Layout, layout_from_model_config
from kvcached_client.doctor.checks import Finding
from kvcached_client.errors import RequestError
from kvcached_client.protocol.engine import OffloadInfo

#: What vLLM takes where none is named, on CPUs and on CUDA devices.
_DEFAULT_BLOCK_SIZE: Final = 128
_DEFAULT_BLOCK_SIZE_ON_CUDA: Final = 16
_LAYERS: Final = "num_hidden_layers"


def check_layout(model: str, flags: VllmFlags, offered: OffloadInfo, *, on_cuda: bool = False) -> Iterator[Finding]:
    """Whether a slab of the host pool holds a block of the model.

    Args:
        model: folder of a model, or its config.json; a name of the hub is not looked up.
        flags: vLLM's arguments, for the sizes in them.
        offered: what the daemon has.
        on_cuda: as for `check_flags`.
    """
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        text = f"{model} is neither a folder nor a config.json here: blocks are not compared with the slabs"
        yield Finding("layout", "warn", text, "name the folder of the model: --model DIR")
        return
    try:
        by_default = _DEFAULT_BLOCK_SIZE_ON_CUDA if on_cuda else _DEFAULT_BLOCK_SIZE
        block_size = int(flags.options.get("block-size") or by_default)
        ranks = int(flags.options.get("tensor-parallel-size") or 1)
        stages = int(flags.options.get("pipeline-parallel-size") or 1)
        config = read_config(model)
        of_stage = _as_one_group(config)
        layers = of_stage.get(_LAYERS) if stages > 1 else 0
        if layers:
            of_stage[_LAYERS] = layers // stages
        layout = layout_from_model_config(of_stage, block_size=block_size, shards=ranks, kv_dtype=_dtype(flags, config))
    except (RequestError, ValueError, OSError, AttributeError) as error:
        yield Finding(
            "layout",
            "warn",
            f"{path} does not tell the size of a block: {error}",
            "compare it by hand: docs/configuration.md",
        )
        return
    if layers and layers % stages:
        told = f"{stages} pipeline stages have unlike parts of {layers} layers"
        yield Finding("layout", "fail", told, "choose a --pipeline-parallel-size that divides the layers")
        return
    yield _compared(layout, ranks * stages, layout.host_parts if stages == 1 else ranks * stages, offered.slab_bytes)


def _compared(layout: Layout, shards: int, parts: int, slab_bytes: int) -> Finding:
    """Whether a slab has room for the parts of a block, of which shards have one each, or all the same one."""
    size = layout.bytes_per_block()
    slots = slots_per_slab(slab_bytes, size, parts)
    alike = ", and is held once for all" if parts < shards else ""
    words = f"a block of {layout.block_size} tokens takes {size} bytes on each of {shards} shards{alike}"
    if slots:
        return Finding("layout", "ok", f"{words}; {slots} of them in a slab of {slab_bytes} bytes")
    fix = f"set slab_bytes in the daemon's [host] table to {smallest_slab(size, parts)} or more"
    return Finding("layout", "fail", f"{words}: a slab of {slab_bytes} bytes holds none", fix)


def _as_one_group(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as vLLM takes it for the connector: layers with windows keep blocks as all others."""
    dtypes = {name: config[name] for name in ("dtype", "torch_dtype") if config.get(name)}
    kept = {name: value for name, value in {**dtypes, **text_config(config)}.items() if name != "layer_types"}
    kinds = set(text_config(config).get("layer_types") or ())
    return kept if kinds <= ATTENTION_LAYERS else dict(config)


def _dtype(flags: VllmFlags, config: Mapping[str, Any]) -> DType | None:
    """Element type of the cache; None for that of the model. By itself vLLM takes bfloat16 for models in float32."""
    named = {"half": "float16", "float": "float32", "fp8": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
    for option in ("kv-cache-dtype", "dtype"):
        value = flags.options.get(option, "auto")
        value = named.get(value, value)
        for dtype in get_args(DType):
            if value == dtype:
                return dtype  # type: ignore[no-any-return]
    text = text_config(config)
    named_by_model = [each[name] for each in (text, config) for name in ("dtype", "torch_dtype") if each.get(name)]
    return "bfloat16" if named_by_model[:1] in ([], ["float32"]) else None
