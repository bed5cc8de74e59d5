"""What the disk backend is told."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from kvcached.config.problems import mistake
from kvcached.config.table import SIZE
from kvcached.storage.backend import StorageMisconfigured


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise mistake("is no absolute path", "start it with /: a relative one would depend on where the daemon starts")
    return path


class DiskSettings(BaseModel):
    """Of one directory, which one daemon uses."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    directory: Annotated[Path, AfterValidator(_absolute)] = Field(
        description="Where the files are. Made if there is none; an existing one is empty or was made by this backend."
    )
    capacity_bytes: Annotated[int, Field(ge=4 << 20, le=1 << 50), SIZE] = Field(
        description="Of the file system, for slots, labels and index together. Least recently used blocks make room.",
    )
    free_space_floor_bytes: Annotated[int, Field(ge=0, le=1 << 50), SIZE] = Field(
        default=1 << 30,
        description="What others on the file system keep. Below it the cache gives files back and stores nothing.",
    )
    threads: int = Field(default=4, ge=1, le=64, description="Reads and writes at a time: the device's queue depth.")
    ttl_s: int | None = Field(
        default=None, ge=1, le=10 * 365 * 86_400, description="Forget a block so long after it was stored."
    )
    direct_io: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: past the page cache, where the file system can and a block's parts are aligned to 4096.",
    )


def validated(settings: dict[str, object]) -> DiskSettings:
    """Settings from a table of the configuration.

    Raises:
        StorageMisconfigured: something in it is unknown, missing or out of range; every mistake is named.
    """
    try:
        return DiskSettings.model_validate(settings)
    except ValidationError as error:
        mistakes = [
            f"{'.'.join(map(str, each['loc']))}: {each['msg'].removeprefix('Value error, ')}" for each in error.errors()
        ]
        raise StorageMisconfigured(f"disk storage: {'; '.join(mistakes)}") from error
