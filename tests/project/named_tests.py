"""Tests that documents name as `` `file::function` ``, and lists of proofs as ``file::function``."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.project.source_tree import ROOT

NODE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def named(document: str) -> list[tuple[str, str]]:
    """The file and the function of each test that a document names, each once."""
    return sorted(set(NODE.findall(document)))


def split(node: str) -> tuple[str, str]:
    """File and function of ``file::function``."""
    file, _, name = node.partition("::")
    return file, name


def is_test(file: str, name: str) -> bool:
    """Whether a file, named from the root of the tree, has such a test."""
    return name.startswith("test_") and name in _functions(ROOT / file)


@cache
def _functions(path: Path) -> set[str]:
    nodes = ast.parse(path.read_text()).body
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
