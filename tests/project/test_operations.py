"""docs/operations.md: what it says that one sees is what the product prints, counts and raises."""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import Iterator
from functools import cache

import pytest

from kvcached_client.errors import ErrorCode
from tests.monitoring.registry import every_metric, queryable
from tests.monitoring.test_documents import alert_rules
from tests.project.documented_commands import PROGRAMS
from tests.project.source_tree import ROOT, modules
from tests.project.test_documents import tables

PAGE = (ROOT / "docs/operations.md").read_text()
_CONNECTOR_METRICS = (ROOT / "kvcached_client/vllm/metrics.py").read_text()


def spans(column: int | None = None) -> list[str]:
    """What stands between ticks in the rows of the tables; in one column of them, or in all."""
    rows = [re.split(r" \| ", line.strip("| ")) for line in PAGE.splitlines() if line.startswith("| ")]
    cells = [cell for row in rows for cell in (row if column is None else row[column : column + 1])]
    return [span for cell in cells for span in re.findall(r"`([^`]+)`", cell)]


def templates(tree: ast.Module) -> Iterator[str]:
    """The texts of a module, with … for what is filled in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(each.value) if isinstance(each, ast.Constant) else "…" for each in node.values]
            yield "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%(?:\(\w+\))?[\d.]*[a-z]|\{\w+(?:!r)?\}", "…", node.value)


@cache
def sources() -> list[str]:
    """The texts of each file of the product."""
    return ["\n".join(templates(tree)) for _, tree in modules("kvcached", "kvcached_client")]


MESSAGES = [span for span in spans(0) if " " in span and span.partition(" ")[0] not in PROGRAMS]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda text: text[:50])
def test_message_is_one_of_the_product(message: str) -> None:
    """Every part of a message between two fillings stands in the texts of one file."""
    parts = [part.strip() for part in message.removeprefix("kvcached: ").split("…") if re.search(r"\w\w", part)]

    assert parts
    assert any(all(part in source for part in parts) for source in sources())


def test_messages_are_found() -> None:
    """The page quotes messages, so that the check above checks something."""
    assert len(MESSAGES) > 40


def test_metrics_and_alerts_exist() -> None:
    """Each metric is exported, by the daemon or by vLLM's connector; the page names each alert, and no other."""

    async def make() -> set[str]:
        return {name for name, _ in queryable(every_metric())} | set(every_metric())

    exported = asyncio.run(make())
    named = {span for span in spans() if re.fullmatch(r"(kvcached|process)_\w+", span)}

    assert named <= exported
    assert len(named) > 15
    assert set(re.findall(r"`(Kvcached\w+)`", PAGE)) == {rule["alert"] for rule in alert_rules()}
    for name in re.findall(r"`vllm:kvcached_(\w+)`", PAGE):
        assert f'"{name}"' in _CONNECTOR_METRICS


def test_names_are_explained() -> None:
    """Each other name is a code of an error, or one that another document explains: a counter, a state, a key."""
    explained = {str(code) for code in ErrorCode}
    for document in ("cli", "configuration", "storage", "engines", "policies", "sdk-reference"):
        explained |= {name for row in tables(ROOT / f"docs/{document}.md") for name in row[0].split(", ")}
        explained |= set(re.findall(r"`(\w+)`", (ROOT / f"docs/{document}.md").read_text()))
    named = {span for span in spans() if re.fullmatch(r"[a-z][a-z0-9_]+", span)}

    assert {name for name in named if not re.match(r"(kvcached|process)_", name)} <= explained
