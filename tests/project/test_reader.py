"""CONTRIBUTING's table of twenty questions: where a reader who knows only names of folders and files finds answers."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

import pytest

from tests.project.source_tree import ROOT

ROWS: Final = 20


class Row(NamedTuple):
    """A question, the file that answers it, and what to look at in there."""

    question: str
    path: str
    symbol: str


def rows() -> list[Row]:
    """The table."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    found = re.findall(r"^\| ([^|]+\?) \| `([^`|]+)` \| `([^`|]+)` \|$", text, re.MULTILINE)
    return [Row(*row) for row in found]


@functools.cache
def class_files() -> dict[str, list[str]]:
    """The files of the product that define each class."""
    found: dict[str, list[str]] = {}
    for folder in ("kvcached", "kvcached_client"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "build" not in path.relative_to(ROOT).parts:
                for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE):
                    found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    return found


def definitions(tree: ast.Module) -> Iterator[str]:
    """What a module defines: its names, and those of its classes as ``Class.name``."""
    for node in tree.body:
        yield from names(node)
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{name}" for inner in node.body for name in names(inner))


def names(node: ast.stmt) -> Iterator[str]:
    """The names that one statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_there_are_twenty_different_questions() -> None:
    """The table has twenty rows, no question twice, and every question names another place."""
    found = rows()

    assert len(found) == ROWS
    assert len({row.question for row in found}) == ROWS
    assert len({row.path for row in found}) == ROWS


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.symbol)
def test_answer_is_where_the_table_says(row: Row) -> None:
    """The file exists and defines the name, and a class of that name stands nowhere else in the product."""
    assert row.symbol in set(definitions(ast.parse((ROOT / row.path).read_text())))
    top = row.symbol.partition(".")[0]
    if top in class_files():
        assert class_files()[top] == [row.path]
