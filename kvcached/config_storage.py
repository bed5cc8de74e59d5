"""The configuration of the tier below the host pool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo
from pydantic.functional_validators import AfterValidator, BeforeValidator

from kvcached.config_layout import Table


def _path(value: object) -> object:
    return Path(value) if isinstance(value, str) else value


def _beside_file(path: Path | None, info: ValidationInfo) -> Path | None:
    directory: Path = (info.context or {}).get("directory", Path())
    return None if path is None else (directory / path).absolute()


class StorageConfig(Table):
    """``[storage]``: a tier below the host pool. Without the table there is none."""

    backend: str = Field(
        default="disk",
        min_length=1,
        max_length=64,
        description='Which one: "disk", or the name of an installed entry point of the group kvcached.storage.',
    )
    backup: Literal["every", "second_sighting", "on_eviction", "never"] = Field(
        default="every",
        description="Which blocks are written: every one as soon as its host copy is complete, those that a later"
        " request has hit, those that are about to leave the host pool, or none.",
    )
    watermark_percent: int = Field(
        default=10,
        ge=1,
        le=90,
        description='With backup = "on_eviction": blocks are written when less of the host pool than this is free.',
    )
    prefetch_threshold_blocks: int = Field(
        default=4, ge=1, le=65_536, description="Fewer blocks than this are not fetched: computing them is as quick."
    )
    prefetch_bytes_per_s: int = Field(
        default=0,
        ge=0,
        le=1 << 42,
        description="What all prefetches together may fetch. Beyond it they are refused, and say so. 0: no limit.",
    )
    prefetch_timeout_ms: int = Field(
        default=1000,
        ge=0,
        le=600_000,
        description='How long a prefetch with stop = "timeout" is waited for, before what follows is added.',
    )
    prefetch_timeout_us_per_token: int = Field(
        default=100, ge=0, le=1_000_000, description="What each token of the prompt adds to that, in microseconds."
    )
    timeout_ms: int = Field(
        default=5000,
        ge=10,
        le=600_000,
        description="A call of the backend that takes longer has failed. After six times as long the storage process is"
        " killed and started again.",
    )
    key_file: Annotated[Path | None, BeforeValidator(_path), AfterValidator(_beside_file)] = Field(
        default=None,
        description="Encrypts all that is stored, names included, with the key in this file: 32 bytes, or 64"
        " hexadecimal digits; nobody but its owner may read it. A relative path starts at this file's folder. Needs"
        " kvcached-daemon[encryption].",
    )
    settings: dict[str, Any] = Field(
        default_factory=dict,
        description="The backend's own table; for disk: directory, capacity_bytes and more, see docs/storage.md.",
    )
    faults: dict[str, Any] = Field(
        default_factory=dict, description="Faults to inject, for tests; see docs/storage.md. Empty: none."
    )
