"""The configuration of the tier below the host pool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationInfo
from pydantic.functional_validators import AfterValidator, BeforeValidator

from kvcached.config.table import SIZE, Table

#: Of the file that says which generation of each namespace is the present one.
RECORD_NAME: Final = "generations.json"


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
        description='"disk", or the name of an installed entry point of the group kvcached.storage.',
    )
    backup: Literal["every", "second_sighting", "on_eviction", "never"] = Field(
        default="every",
        description="Which blocks are written: every block as soon as its host copy is complete, blocks that a later"
        " request has hit, blocks that are about to leave the host pool, or none.",
    )
    watermark_percent: int = Field(
        default=10,
        ge=1,
        le=90,
        description='With backup = "on_eviction": blocks are written when less than this part of the host pool is'
        " free.",
    )
    prefetch_threshold_blocks: int = Field(
        default=4,
        ge=1,
        le=65_536,
        description="Fewer blocks than this are not fetched, because computing them is as fast.",
    )
    prefetch_bytes_per_s: Annotated[int, Field(ge=0, le=1 << 42), SIZE] = Field(
        default=0,
        description="Rate limit of all prefetches together. Prefetches beyond it are refused with this reason. 0: no"
        " limit.",
    )
    prefetch_timeout_ms: int = Field(
        default=1000,
        ge=0,
        le=600_000,
        description='How long a request waits for a prefetch with stop = "timeout", plus the time for each token'
        " (next key).",
    )
    prefetch_timeout_us_per_token: int = Field(
        default=100,
        ge=0,
        le=1_000_000,
        description="What each token of the prompt adds to prefetch_timeout_ms, in microseconds.",
    )
    timeout_ms: int = Field(
        default=5000,
        ge=10,
        le=600_000,
        description="A call of the backend that takes longer has failed. After six times as long, the storage"
        " process is killed and restarted.",
    )
    key_file: Annotated[Path | None, BeforeValidator(_path), AfterValidator(_beside_file)] = Field(
        default=None,
        description="Encrypts all stored blocks and their names with the key in this file: 32 bytes, or 64"
        " hexadecimal digits; only its owner may have read permission. A relative path starts at this file's"
        " directory. Needs kvcached-daemon[encryption].",
    )
    settings: dict[str, Any] = Field(
        default_factory=dict,
        description="The backend's own table; for disk: directory, capacity_bytes and others, see docs/storage.md.",
    )

    @property
    def record_path(self) -> Path | None:
        """Where the record of generations is; None where the backend has no directory for it.

        Settings that the backend will refuse have none either.
        """
        directory = self.settings.get("directory")
        if self.backend != "disk" or not isinstance(directory, str) or not Path(directory).is_absolute():
            return None
        return Path(directory) / RECORD_NAME
