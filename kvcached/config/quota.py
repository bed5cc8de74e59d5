"""``[host.quota]``: what namespaces, and tenants in them, have of the host pool."""

from __future__ import annotations

from typing import Final, Self

from pydantic import Field, model_validator

from kvcached.config.base_table import Table
from kvcached.config.problems import mistake
from kvcached_client.protocol.fields import TENANT_CHARS_MAX

_ALL_PERCENT: Final = 100
_PATTERN_CHARACTERS: Final = frozenset("*?[")


class QuotaBounds(Table):
    """What a namespace keeps of the host pool, and what it has at most."""

    floor_percent: int = Field(
        default=0,
        ge=0,
        le=100,
        description="Part of the slabs that other namespaces never take from this one, even if no engine uses it.",
    )
    cap_percent: int = Field(
        default=100, ge=1, le=100, description="Largest part of the slabs that a namespace may have; at least one slab."
    )

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.floor_percent > self.cap_percent:
            what = f"is more than cap_percent, {self.cap_percent}"
            raise mistake(what, "use a smaller floor or a larger cap", ("floor_percent",), self.floor_percent)
        return self


class NamespaceQuota(QuotaBounds):
    """``[[host.quota.namespace]]``: bounds of some namespaces instead of those of all."""

    label: str = Field(
        min_length=1,
        max_length=256,
        description="The namespaces that these bounds apply to: the label that engines in offload mode give their"
        " namespace (the model), or the name of a replica. A shell pattern, as in `llama-*`; the first match counts.",
    )


class TenantQuota(QuotaBounds):
    """``[[host.quota.tenant]]``: bounds of some tenants in each namespace."""

    label: str = Field(
        min_length=1,
        max_length=TENANT_CHARS_MAX,
        description="The tenants that these bounds apply to, each on its own: what requests give as `tenant`. A shell"
        " pattern, as in `free-*`; the first match counts. Tenants that no table names have no bounds.",
    )
    floor_percent: int = Field(
        default=0,
        ge=0,
        le=100,
        description="Part of its namespace's host slots that a tenant does not lose to others once it has them.",
    )
    cap_percent: int = Field(
        default=100,
        ge=1,
        le=100,
        description="Largest part of its namespace's host slots that a tenant may have; then its own blocks go first.",
    )

    @model_validator(mode="after")
    def _check_pattern(self) -> Self:
        if self.floor_percent and not _PATTERN_CHARACTERS.isdisjoint(self.label):
            what = f"is for each of any number of tenants, because {self.label!r} is a pattern"
            raise mistake(
                what, "name one tenant for a floor; a pattern may have a cap", ("floor_percent",), self.floor_percent
            )
        return self


class QuotaConfig(QuotaBounds):
    """``[host.quota]``: bounds of every namespace. Within them each one in use has an equal share."""

    namespace: tuple[NamespaceQuota, ...] = Field(
        default=(), strict=False, description="Other bounds for some namespaces."
    )
    tenant: tuple[TenantQuota, ...] = Field(
        default=(), strict=False, description="Bounds of tenants, within what their namespace has."
    )

    @model_validator(mode="after")
    def _check_floors(self) -> Self:
        for key, tables in (("namespace", self.namespace), ("tenant", self.tenant)):
            floors = sum(each.floor_percent for each in tables)
            if floors > _ALL_PERCENT:
                last = len(tables) - 1
                at = (key, last, "floor_percent")
                what = f"makes the floors of all these tables {floors} percent together"
                raise mistake(what, "use floors of 100 percent or less in all", at, tables[last].floor_percent)
        return self
