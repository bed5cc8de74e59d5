"""A model's `config.json`, as `kvcached doctor` reads it for every engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_config(model: str) -> dict[str, Any]:
    """The configuration of a model in this folder or file.

    Raises:
        OSError: there is none here.
        ValueError: it is no JSON object.
    """
    path = Path(model)
    text = (path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8")
    try:
        config = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(config, dict):
        raise ValueError("it is no JSON object")  # noqa: TRY004 - as for text that is no JSON
    return config


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part about text of a model that takes other things, too."""
    text = config.get("text_config", config)
    return text if isinstance(text, dict) else config
