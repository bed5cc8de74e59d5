"""The configuration of the host tier, and what it must be large enough for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from pydantic import Field, model_validator

from kvcached.config_error import mistake
from kvcached.config_layout import SLOTS_MAX, Table
from kvcached.config_policy import EvictionPolicyName, WritePolicyName
from kvcached_client.layout import POOL_SIZE_BYTES_MAX, Layout
from kvcached_client.memory_bounds import memory_bounds
from kvcached_client.slabs import PAGE_BYTES, slots_per_slab, smallest_slab


class HostConfig(Table):
    """``[host]``: one pool of host memory, which all replicas share. Without the table there is no host tier."""

    size_bytes: int | None = Field(
        default=None,
        ge=1,
        le=POOL_SIZE_BYTES_MAX,
        description="Memory of the host pool, of all shards of all replicas together; as many slabs as fit. Either this"
        " or memory_percent is named.",
    )
    memory_percent: int | None = Field(
        default=None,
        ge=1,
        le=90,
        description="The same as a part of the machine's memory, or of what the daemon's cgroup is limited to where"
        " that is less.",
    )
    slab_bytes: int = Field(
        default=64 << 20,
        ge=PAGE_BYTES,
        le=POOL_SIZE_BYTES_MAX,
        multiple_of=PAGE_BYTES,
        description="What one namespace gets at a time. Smaller slabs divide memory more finely, larger ones waste less"
        " of it at their ends.",
    )
    verify_loads: bool = Field(
        default=True,
        description="Compare each loaded block's checksum with that of what was stored. Keys are compared always.",
    )
    eviction_policy: EvictionPolicyName = Field(
        default="lru",
        description="Which blocks of a namespace leave the host pool first when others need room: docs/policies.md.",
    )

    _pool_bytes: int = 0

    @model_validator(mode="after")
    def _settle_size(self) -> Self:
        if (self.size_bytes is None) == (self.memory_percent is None):
            what = "is missing, and so is memory_percent" if self.size_bytes is None else "stands beside memory_percent"
            raise mistake(what, "name one of the two", ("size_bytes",), self.size_bytes)
        self._pool_bytes = self.size_bytes or self._part_of_memory()
        return self

    def _part_of_memory(self) -> int:
        limits = [bound.limit_bytes for bound in memory_bounds()]
        if not limits:
            at = ("memory_percent",)
            raise mistake("cannot be told from /proc/meminfo here", "name size_bytes", at, self.memory_percent)
        return min(limits) * (self.memory_percent or 0) // 100

    @property
    def slabs(self) -> int:
        """Slabs of the pool."""
        return self._pool_bytes // self.slab_bytes

    def slots_per_slab(self, layout: Layout) -> int:
        """Blocks of a layout that a slab holds, with all their shards."""
        return slots_per_slab(self.slab_bytes, layout.bytes_per_block(), layout.host_parts)

    def check(self, layouts: Mapping[str, Layout], *, namespaces: int) -> None:
        """Refuse a pool that cannot serve every namespace.

        Raises:
            PydanticCustomError: a slab holds no block of one of them, or there are too few slabs or too many slots.
        """
        by_bytes = self.memory_percent is None
        key = "size_bytes" if by_bytes else "memory_percent"
        value = self.size_bytes if by_bytes else self.memory_percent
        for name, layout in layouts.items():
            block_bytes, parts = layout.bytes_per_block(), layout.host_parts
            per_slab = self.slots_per_slab(layout)
            if not per_slab:
                raise mistake(
                    f"holds no block of replica {name!r}: one takes {parts} x {block_bytes} bytes and as many headers",
                    f"use {smallest_slab(block_bytes, parts)} or more",
                    ("host", "slab_bytes"),
                    self.slab_bytes,
                )
            if per_slab * self.slabs > SLOTS_MAX:
                raise mistake(
                    f"holds {per_slab * self.slabs} blocks of replica {name!r}, {SLOTS_MAX} are possible",
                    f"use a smaller {key}, or a larger block_size",
                    ("host", key),
                    value,
                )
        if self.slabs < namespaces:
            needed = namespaces * self.slab_bytes
            more = f"use {needed} or more" if by_bytes else f"use a larger one: they take {needed} bytes"
            raise mistake(
                f"makes {self.slabs} slabs of {self.slab_bytes} bytes; namespaces, which take one each: {namespaces}",
                f"{more}, or a smaller slab_bytes",
                ("host", key),
                value,
            )


class AttachedConfig(Table):
    """``[attached]``: engines that keep their own device memory may use the host pool. Without the table none may."""

    namespaces_max: int = Field(
        default=8,
        ge=1,
        le=256,
        description="Models, with their layouts, that engines may bring at a time. One that no engine uses any more"
        " makes room for the next.",
    )
    write_policy: WritePolicyName = Field(
        default="write_through",
        description="Which blocks that engines offer are copied to the host pool: docs/policies.md. write_back is"
        " write_through here.",
    )
