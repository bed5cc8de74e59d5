from __future__ import annotations

import re

import pytest

from tests.project.named_tests import NODE, is_test, named
from tests.project.source_tree import ROOT

DOCUMENT = (ROOT / "docs/faults.md").read_text()
#: Scenarios that need a GPU or storage, which this version does not have.
LEFT_OUT = {17, 18, 19}
SCENARIOS = 36


def scenarios() -> dict[int, str]:
    """Each scenario's number, and the text up to the next one."""
    parts = re.split(r"^- \*\*(\d+)\*\* ", DOCUMENT, flags=re.MULTILINE)
    return dict(zip(map(int, parts[1::2]), parts[2::2], strict=True))


@pytest.mark.parametrize("node", named(DOCUMENT), ids="::".join)
def test_scenario_names_a_test_that_exists(node: tuple[str, str]) -> None:
    """Every test that docs/faults.md names is a function of the file that it names."""
    assert is_test(*node)


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
