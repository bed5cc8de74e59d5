from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.project.source_tree import ROOT

DOCUMENT = (ROOT / "docs/faults.md").read_text()
NODE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
#: Scenarios that need a GPU or storage, which this version does not have.
LEFT_OUT = {13, 17, 18, 19, 24, 25, 26, 27, 28, 36}
SCENARIOS = 36


def scenarios() -> dict[int, str]:
    """Each scenario's number, and the text up to the next one."""
    parts = re.split(r"^- \*\*(\d+)\*\* ", DOCUMENT, flags=re.MULTILINE)
    return dict(zip(map(int, parts[1::2]), parts[2::2], strict=True))


@cache
def functions(path: Path) -> set[str]:
    """The names of a file's functions."""
    nodes = ast.parse(path.read_text()).body
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("node", sorted(set(NODE.findall(DOCUMENT))), ids="::".join)
def test_scenario_names_a_test_that_exists(node: tuple[str, str]) -> None:
    """Every test that docs/faults.md names is a function of the file that it names."""
    file, name = node

    assert name.startswith("test_")
    assert name in functions(ROOT / file)


def test_every_scenario_has_a_test() -> None:
    """Each scenario that needs neither GPU nor storage is there once, with a test at least."""
    named = [int(number) for number in re.findall(r"^- \*\*(\d+)\*\* ", DOCUMENT, re.MULTILINE)]

    assert sorted(named) == sorted(set(range(1, SCENARIOS + 1)) - LEFT_OUT)
    assert [number for number, text in scenarios().items() if not NODE.search(text)] == []


def test_what_is_left_out_is_said() -> None:
    """The document names the scenarios that it leaves out."""
    said = DOCUMENT[: DOCUMENT.index("## Engines")]
    ranges = re.findall(r"\b(\d+)(?: to (\d+))?\b", said[said.index("Left out") : said.index("Their numbers")])
    numbers = {number for first, last in ranges for number in range(int(first), int(last or first) + 1)}

    assert numbers - {30} == LEFT_OUT
