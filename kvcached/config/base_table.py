"""What all tables of a configuration have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Table(BaseModel):
    """Root of the tables: frozen, strict, nothing unknown."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", validate_default=True, serialize_by_alias=True)
