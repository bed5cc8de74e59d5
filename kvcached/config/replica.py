"""The part of a configuration that is about one replica: its model, its layout, its pool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, PrivateAttr, ValidationInfo, model_validator
from pydantic.functional_validators import AfterValidator, BeforeValidator

from kvcached.config.base_table import Table
from kvcached.config.problems import mistake
from kvcached.config.tables import SIZE, SLOTS_MAX, EvictionPolicyName, WritePolicyName
from kvcached_client.blocks.layout import (
    POOL_SIZE_BYTES_MAX,
    DType,
    KvGroup,
    Layout,
    PageOrder,
    layout_from_model_config,
)
from kvcached_client.errors import RequestError
from kvcached_client.keys import KeyAlgorithm, namespace_root

#: One worker process per shard: more than a node has accelerators is a mistake.
SHARDS_MAX: Final = 64
#: The name is part of socket names, and a socket's path has 107 bytes in all.
REPLICA_NAME_LENGTH_MAX: Final = 32
#: Stands beside the names of replicas wherever tiers are told apart.
HOST_TIER_NAME: Final = "host"

_SIZE_MAX: Final = 1 << 20

_Size = Annotated[int, Field(ge=1, le=_SIZE_MAX)]


def _not_reserved(name: str) -> str:
    if name == HOST_TIER_NAME:
        raise mistake("is what reports call the host pool", "choose another name")
    return name


def _path(value: object) -> object:
    return Path(value) if isinstance(value, str) else value


FilePath = Annotated[Path, BeforeValidator(_path)]


class GroupConfig(Table):
    """``[[replica.group]]``: layers whose pages look alike. Sizes are those of one shard."""

    layers: _Size = Field(description="Number of layers.")
    kv_heads: _Size = Field(description="KV heads held by one shard.")
    head_dim: _Size = Field(description="Elements of K per head and token; for latent attention, rank + rotary part.")
    v_head_dim: int = Field(ge=0, le=_SIZE_MAX, description="Elements of V per head and token; 0 = there is no V.")
    dtype: DType = Field(description="Element type.")
    scale_bytes: Annotated[int, Field(ge=0, le=_SIZE_MAX), SIZE] = Field(
        default=0, description="Bytes of quantisation scales in one layer's page of one block."
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
    except (ValueError, RecursionError) as error:
        raise mistake(f"is no JSON: {error}", "name a model's config.json", *at) from None
    if not isinstance(model, dict):
        raise mistake("holds no JSON object", "name a model's config.json", *at)
    try:
        return layout_from_model_config(model, block_size=block_size, shards=shards, kv_dtype=kv_dtype, order=order)
    except RequestError as error:
        raise mistake(error.message, error.fix, *at) from None


class ReplicaConfig(Table):
    """``[[replica]]``: one engine's device pool, the same slots on each of its shards.

    Attributes:
        layout: the shape of a block, from the groups or from the model's config.json.
        slot_count: slots of the pool, as named or as many as the budget holds.
    """

    name: Annotated[str, AfterValidator(_not_reserved)] = Field(
        pattern=r"^[a-z0-9-]+$",
        min_length=1,
        max_length=REPLICA_NAME_LENGTH_MAX,
        description="The name by which engines connect. Also part of the names of the workers' sockets and logs.",
    )
    device: Literal["cpu", "cuda"] = Field(
        default="cpu",
        description='Where the pool lies: "cpu" is shared memory, "cuda" is memory of CUDA devices, one a shard.',
    )
    cuda_devices: tuple[Annotated[int, Field(ge=0, lt=SHARDS_MAX)], ...] = Field(
        default=(),
        strict=False,
        description="The CUDA device of each shard, counted as the daemon sees them (`CUDA_VISIBLE_DEVICES`). Default:"
        ' 0, 1, … Only with `device = "cuda"`.',
    )
    model: str = Field(
        min_length=1,
        max_length=256,
        description="Identity of the weights. `model`, `revision` and the layout determine all keys: pools that"
        " agree in them share prefixes.",
    )
    revision: str = Field(default="", max_length=256, description="Version of the weights.")
    key_algorithm: KeyAlgorithm = Field(
        default="blake3",
        description="Hash of the block keys. xxh3 is faster but can be forged: use it only on nodes with a single"
        " tenant.",
    )
    block_size: int = Field(default=16, ge=1, le=1024, description="Tokens per block.")
    shards: int = Field(
        default=1,
        ge=1,
        le=SHARDS_MAX,
        description="Number of shards, each of which holds a part of each block: the tensor-parallel degree.",
    )
    page_order: PageOrder = Field(
        default="layer_first",
        description="layer_first keeps a layer contiguous, as attention kernels expect it; block_first keeps a block"
        " contiguous, for large copies. Replicas that differ only in this share their blocks.",
    )
    slots: int | None = Field(
        default=None, ge=1, le=SLOTS_MAX, description="Blocks that the pool holds. Either this or `pool_bytes`."
    )
    pool_bytes: Annotated[int, Field(ge=1, le=POOL_SIZE_BYTES_MAX), SIZE] | None = Field(
        default=None,
        description="Memory of the pool on each shard; as many blocks as fit. Either this or `slots`.",
    )
    model_config_path: FilePath | None = Field(
        default=None,
        alias="model_config",
        description="The model's config.json, to take the layout from; a relative path starts at this file's folder."
        " Either this or `group`.",
    )
    kv_dtype: DType | None = Field(
        default=None, description="Element type of the cache, if it differs from the model's. Only with `model_config`."
    )
    free_watermark_percent: int = Field(
        default=2,
        ge=0,
        le=50,
        description="Part of the pool that the daemon keeps free ahead of need, by evicting blocks that have a copy"
        " in the host pool. Only with `[host]`.",
    )
    load_threshold_blocks: int = Field(
        default=2,
        ge=1,
        le=SLOTS_MAX,
        description="Shorter hits in the host pool are recomputed instead of loaded. Only with `[host]`.",
    )
    load_quota_blocks: int | None = Field(
        default=None,
        ge=1,
        le=SLOTS_MAX,
        description="Largest number of blocks being loaded at once; a longer hit is cut. Default: half the pool, or"
        " the threshold if that is larger. Only with `[host]`.",
    )
    write_policy: WritePolicyName = Field(
        default="write_through",
        description="When blocks are copied to the host pool: docs/policies.md. Must be the same for replicas that"
        " share prefixes. Only with `[host]`.",
    )
    eviction_policy: EvictionPolicyName = Field(
        default="lru", description="Which blocks are evicted from the pool first: docs/policies.md."
    )
    group: tuple[GroupConfig, ...] = Field(
        default=(),
        max_length=16,
        strict=False,
        description="The layout in groups of layers. Either this or `model_config`.",
    )
    _layout: Layout = PrivateAttr()

    @property
    def layout(self) -> Layout:
        """The shape of a block on one shard."""
        return self._layout

    @property
    def cuda_ordinals(self) -> tuple[int, ...]:
        """The CUDA device of each shard; none on a CPU."""
        return (self.cuda_devices or tuple(range(self.shards))) if self.device == "cuda" else ()

    @property
    def host_memory_bytes(self) -> int:
        """Memory of this machine that the pool takes, all its shards."""
        return 0 if self.device == "cuda" else self._layout.pool_bytes(self.slot_count) * self.shards

    @property
    def slot_count(self) -> int:
        """Slots of the pool, the same on every shard."""
        return self.slots if self.slots is not None else self._layout.blocks_per_budget(self.pool_bytes or 0)

    @property
    def watermark_slots(self) -> int:
        """Slots to keep free ahead of need."""
        return self.slot_count * self.free_watermark_percent // 100

    def namespace(self, generation: int, weights_version: str = "") -> bytes:
        """The 32-byte root of its keys: replicas that share it share their prefixes.

        A `weights_version` stands in place of `revision`.
        """
        return namespace_root(
            model=self.model,
            revision=weights_version or self.revision,
            layout_fingerprint=self._layout.block_fingerprint(),
            block_size=self.block_size,
            shards=self.shards,
            algorithm=self.key_algorithm,
            generation=generation,
        )

    @model_validator(mode="after")
    def _check_choices(self, info: ValidationInfo) -> Self:
        if self.slots is None and self.pool_bytes is None:
            raise mistake("is missing, and so is pool_bytes", "name one of the two", ("slots",))
        if self.slots is not None and self.pool_bytes is not None:
            raise mistake("stands beside pool_bytes", "name one of the two", ("slots",), self.slots)
        if self.model_config_path is None and not self.group:
            raise mistake(
                "is missing, and so is group", "name one of the two: the layout comes from it", ("model_config",)
            )
        if self.model_config_path is not None and self.group:
            path = str(self.model_config_path)
            raise mistake(
                "stands beside group", "name one of the two: the layout comes from it", ("model_config",), path
            )
        if self.group and self.kv_dtype is not None:
            raise mistake("stands beside group", "write the dtype into each group", ("kv_dtype",), self.kv_dtype)
        if self.cuda_devices and self.device != "cuda":
            raise mistake('stands beside device = "cpu"', 'set device = "cuda"', ("cuda_devices",), self.cuda_devices)
        if self.cuda_devices and len(self.cuda_devices) != self.shards:
            raise mistake(
                f"names {len(self.cuda_devices)} devices for {self.shards} shards",
                "name one for each shard",
                ("cuda_devices",),
                self.cuda_devices,
            )
        if self.load_quota_blocks is not None and self.load_quota_blocks < self.load_threshold_blocks:
            raise mistake(
                f"is less than load_threshold_blocks ({self.load_threshold_blocks}): nothing would ever be loaded",
                "use a larger quota, or a smaller threshold",
                ("load_quota_blocks",),
                self.load_quota_blocks,
            )
        directory = (info.context or {}).get("directory", Path())
        self._layout = self._layout_of_groups() if self.group else self._layout_of_model(directory)
        self._check_size()
        return self

    def _layout_of_groups(self) -> Layout:
        groups = tuple(KvGroup(**group.model_dump()) for group in self.group)
        return Layout(block_size=self.block_size, shards=self.shards, groups=groups, order=self.page_order)

    def _layout_of_model(self, directory: Path) -> Layout:
        return layout_of_model(
            directory / (self.model_config_path or ""),
            block_size=self.block_size,
            shards=self.shards,
            kv_dtype=self.kv_dtype,
            order=self.page_order,
        )

    def _check_size(self) -> None:
        at: Final = (("pool_bytes",), self.pool_bytes) if self.slots is None else (("slots",), self.slots)
        bytes_per_block = self._layout.bytes_per_block()
        size_bytes = self._layout.pool_bytes(self.slot_count)
        if not size_bytes:
            raise mistake(f"holds no block: one takes {bytes_per_block} bytes", "give the pool more memory", *at)
        if self.slot_count > SLOTS_MAX:
            raise mistake(f"holds {self.slot_count} blocks, {SLOTS_MAX} are possible", "use a larger block_size", *at)
        if size_bytes > POOL_SIZE_BYTES_MAX:
            limit = f"{POOL_SIZE_BYTES_MAX} are possible"
            raise mistake(f"{bytes_per_block} bytes each make {size_bytes}, {limit}", "use fewer slots", *at)
