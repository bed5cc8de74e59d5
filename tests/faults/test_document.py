from __future__ import annotations

import re
import tomllib

import pytest

from tests.project.named_tests import is_test, named, split
from tests.project.source_tree import ROOT

DOCUMENT = (ROOT / "docs/faults.md").read_text()
PROOFS: dict[str, list[str]] = tomllib.loads((ROOT / "tests/faults/proofs.toml").read_text())
SCENARIOS = 36


def ids() -> list[str]:
    """The id of each fault in the document's tables."""
    return re.findall(r"^\| (\d+|[A-Z]\d+) \| ", DOCUMENT, re.MULTILINE)


@pytest.mark.parametrize("node", named(DOCUMENT), ids="::".join)
def test_scenario_names_a_test_that_exists(node: tuple[str, str]) -> None:
    """Every test that docs/faults.md names is a function of the file that it names."""
    assert is_test(*node)


@pytest.mark.parametrize("node", sorted({node for nodes in PROOFS.values() for node in nodes}))
def test_proof_is_a_test_that_exists(node: str) -> None:
    """Every test that tests/faults/proofs.toml names is a function of the file that it names."""
    assert is_test(*split(node))


def test_every_fault_has_a_test() -> None:
    """Each fault in the document has a test at least, each once, and there are no proofs of anything else."""
    assert sorted(ids()) == sorted(PROOFS)
    assert [fault for fault, nodes in PROOFS.items() if not nodes or len(nodes) != len(set(nodes))] == []


def test_every_scenario_is_there() -> None:
    """Each scenario of the list is there once."""
    numbers = [int(each) for each in ids() if each.isdecimal()]

    assert sorted(numbers) == list(range(1, SCENARIOS + 1))
