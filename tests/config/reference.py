"""The tables of docs/configuration.md, made from the schema."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from kvcached.config.problems import expectation, resolved


def rows(model: type[BaseModel]) -> list[str]:
    """One table row per key of a model: key, what it takes, default, what it means."""
    root = model.model_json_schema()
    return [_row(name, prop, root) for name, prop in root["properties"].items()]


def _row(name: str, prop: dict[str, Any], root: dict[str, Any]) -> str:
    expected = expectation(name, resolved(prop, root))
    if name in root.get("required", ()):
        default = "required"
    else:
        default = "" if prop.get("default") in (None, []) else f"`{json.dumps(prop['default'])}`"
    return f"| `{name}` | {expected.replace('|', chr(92) + '|')} | {default} | {prop['description']} |"
