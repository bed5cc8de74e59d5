"""What the tables of a configuration have in common: their root, sizes such as "64GiB", names of policies."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, TypeAdapter, ValidationError

from kvcached.config.problems import mistake

#: Slots travel as int32.
SLOTS_MAX: Final = (1 << 31) - 1
#: The values of `kvcached_client.types.WritePolicy`.
WritePolicyName: TypeAlias = Literal["write_through", "write_through_selective", "write_back", "never"]
#: The names in `kvcached.core.eviction.by_priority`.
EvictionPolicyName: TypeAlias = Literal["lru", "slru"]

_PARSER: Final = TypeAdapter(ByteSize)


def _parsed(value: object) -> object:
    """The bytes that a text means. Everything else is left to the validators behind this one."""
    if not isinstance(value, str):
        return value
    try:
        return int(_PARSER.validate_python(value))
    except (ValidationError, OverflowError):
        raise mistake("is no size", 'give bytes, or a number with its unit, as "512MiB" or "64GiB"') from None


#: Stands behind the limits of a key: ``Annotated[int, Field(ge=1, le=1 << 40), SIZE]``.
SIZE: Final = BeforeValidator(_parsed)


class Table(BaseModel):
    """Root of the tables: frozen, strict, nothing unknown."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", validate_default=True, serialize_by_alias=True)
