"""Where a configuration's layout comes from: groups of layers by hand, or a model's config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from kvcached.config_error import mistake
from kvcached_client.errors import RequestError
from kvcached_client.layout import DType, Layout, PageOrder, layout_from_model_config

#: Slots travel as int32.
SLOTS_MAX: Final = (1 << 31) - 1
_SIZE_MAX: Final = 1 << 20

_Size = Annotated[int, Field(ge=1, le=_SIZE_MAX)]


class Table(BaseModel):
    """Root of the tables: frozen, strict, nothing unknown."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", validate_default=True, serialize_by_alias=True)


class GroupConfig(Table):
    """``[[replica.group]]``: layers whose pages look alike. Sizes are those of one shard."""

    layers: _Size = Field(description="Number of layers.")
    kv_heads: _Size = Field(description="KV heads held by one shard.")
    head_dim: _Size = Field(description="Elements of K per head and token; for latent attention, rank + rotary part.")
    v_head_dim: int = Field(ge=0, le=_SIZE_MAX, description="Elements of V per head and token; 0 = there is no V.")
    dtype: DType = Field(description="Element type.")
    scale_bytes: int = Field(
        default=0, ge=0, le=_SIZE_MAX, description="Bytes of quantisation scales in one layer's page of one block."
    )
    replicated: bool = Field(
        default=False,
        description="Every shard holds the same bytes (latent attention). Where all groups do, the host pool and"
        " storage hold them once.",
    )


def layout_of_model(path: Path, *, block_size: int, shards: int, kv_dtype: DType | None, order: PageOrder) -> Layout:
    """The layout of one shard of the model whose config.json is at `path`.

    Raises:
        PydanticCustomError: the file cannot be read or does not tell it; a mistake of the key ``model_config``.
    """
    at: Final = (("model_config",), str(path))
    try:
        model = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise mistake(f"cannot be read: {error.strerror}", "name a model's config.json", *at) from None
    except ValueError as error:
        raise mistake(f"is no JSON: {error}", "name a model's config.json", *at) from None
    if not isinstance(model, dict):
        raise mistake("holds no JSON object", "name a model's config.json", *at)
    try:
        return layout_from_model_config(model, block_size=block_size, shards=shards, kv_dtype=kv_dtype, order=order)
    except RequestError as error:
        raise mistake(error.message, error.fix, *at) from None
