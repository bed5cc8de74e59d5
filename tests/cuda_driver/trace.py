"""Read the trace that the fake driver writes where `FAKE_CUDA_TRACE` points."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Record:
    """One call of the driver, or one operation that a stream did (`kind` is "call" or "ran")."""

    order: int  # of all processes of the device; of a call when it ended, of an operation when it was done
    process: int
    thread: int
    kind: str
    name: str
    stream: int  # 0: none, or the NULL stream
    result: str
    rule: str  # that was broken; "" if none was
    arguments: dict[str, int]


def read(path: Path) -> list[Record]:
    """Every record, of all processes, in the order in which they happened. Raises ValueError for a broken line."""
    lines = path.read_text().splitlines() if path.exists() else []
    return sorted((Record(**json.loads(line)) for line in lines), key=lambda record: record.order)


def calls(records: list[Record], name: str) -> list[Record]:
    """The calls with this name; versions of it (`cuMemAlloc_v2`) count as well."""
    return [record for record in records if record.kind == "call" and record.name in {name, f"{name}_v2"}]


def ran(records: list[Record], name: str = "") -> list[Record]:
    """The operations that streams did, or those with this name."""
    return [record for record in records if record.kind == "ran" and name in {"", record.name}]


def broken_rules(records: list[Record]) -> list[str]:
    """The rules that were broken, as `call: rule`. What the driver refuses by its seed breaks none."""
    return [
        f"{record.name}: {record.rule}"
        for record in records
        if record.rule and not record.rule.endswith("refused by seed")
    ]
