from __future__ import annotations

import re
import tomllib

import pytest

from tests.project.named_tests import NODE, is_test, named, split
from tests.project.source_tree import ROOT

DOCUMENT = (ROOT / "docs/behaviours.md").read_text()
PROOFS: dict[str, list[str]] = tomllib.loads((ROOT / "tests/project/behaviours.toml").read_text())
#: Families that this version covers; the document says what the missing letters stand for.
FAMILIES = "ABCDEFGHIJKLNOPRTU"


def rows() -> list[tuple[str, str]]:
    """Each behaviour: its id, and the text up to the next one."""
    parts = re.split(r"^- \*\*([A-Z]\d+)\*\* ", DOCUMENT.split("\n## ", 1)[1], flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("node", named(DOCUMENT), ids="::".join)
def test_behaviour_names_a_test_that_exists(node: tuple[str, str]) -> None:
    """Every test that docs/behaviours.md names is a function of the file that it names."""
    assert is_test(*node)


@pytest.mark.parametrize("node", sorted({node for nodes in PROOFS.values() for node in nodes}))
def test_proof_is_a_test_that_exists(node: str) -> None:
    """Every test that tests/project/behaviours.toml names is a function of the file that it names."""
    assert is_test(*split(node))


def test_nothing_in_the_document_looks_like_a_test_and_is_none() -> None:
    """Every mention of a test file is one of a test in it, so that none escapes the check above."""
    mentions = re.findall(r"\btests/(?!project/behaviours\.toml)", DOCUMENT)
    assert len(mentions) == len(NODE.findall(DOCUMENT))


def test_behaviours_are_numbered_in_order() -> None:
    """Each family's ids count from one without gaps, and families follow each other under a heading of their own."""
    ids = [name for name, _ in rows()]

    assert re.findall(r"^## ([A-Z])\. ", DOCUMENT, re.MULTILINE) == list(FAMILIES)
    counts = {letter: sum(name[0] == letter for name in ids) for letter in FAMILIES}
    assert ids == [f"{letter}{number}" for letter in FAMILIES for number in range(1, counts[letter] + 1)]
    assert all(counts.values())


def test_every_behaviour_has_a_test_or_a_reason() -> None:
    """A behaviour without a test says that it is not covered, or why there is nothing to test; there are no others."""
    ids = {name for name, _ in rows()}
    excused = {name for name, text in rows() if re.search(r"^  - (By construction|Not covered): ", text, re.MULTILINE)}

    assert ids - PROOFS.keys() <= excused
    assert PROOFS.keys() <= ids
    assert [name for name, nodes in PROOFS.items() if not nodes] == []
