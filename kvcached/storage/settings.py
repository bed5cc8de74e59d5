"""What the settings of backends have in common: absolute paths, and one voice for their mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, ValidationError

from kvcached.config.problems import mistake
from kvcached.storage.backend import StorageMisconfigured

Settings = TypeVar("Settings", bound=BaseModel)


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise mistake("is no absolute path", "start it with /: a relative one would depend on where the daemon starts")
    return path


#: A path that does not depend on where the daemon starts.
AbsolutePath: TypeAlias = Annotated[Path, AfterValidator(_absolute)]


def checked(kind: type[Settings], settings: Mapping[str, object], backend: str) -> Settings:
    """Settings from a table of the configuration.

    Raises:
        StorageMisconfigured: some settings are unknown, missing or out of range; the message names all of them.
    """
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        mistakes = []
        for each in error.errors(include_input=False):
            fix = each.get("ctx", {}).get("fix", "")
            told = each["msg"].removeprefix("Value error, ") + (f" ({fix})" if fix else "")
            mistakes.append(f"{'.'.join(map(str, each['loc']))}: {told}")
        raise StorageMisconfigured(f"{backend} storage: {'; '.join(mistakes)}") from error
