"""Mutants stay what they are for; `python -m tests.mutants.run`, which .ci/run starts, lets their tests judge them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter

import pytest

from kvcached.storage.encryption import cipher
from tests.mutants.mutant import NOT_MADE, VARIABLE, DoesNotApply, Mutant, found_at, rewrite
from tests.mutants.run import EVERY_PROCESS, mutants
from tests.mutants.storage import encrypted_part_of_any_place
from tests.project.source_tree import ROOT


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.name)
def test_mutant_applies_and_names_a_test(mutant: Mutant) -> None:
    """Every mistake can be made in the code as it is now, says what it breaks, and names a test that exists."""
    with mutant.made():
        pass
    file, _, test = mutant.test.partition("::")
    names = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}

    assert test.partition("[")[0] in names
    assert mutant.breaks.endswith(".")
    assert found_at(mutant.address) is mutant


def test_no_two_mutants_have_one_name() -> None:
    """A name on the command line means one mutant."""
    assert [name for name, count in Counter(each.name for each in mutants()).items() if count > 1] == []


def _shown(first: int, second: int) -> str:
    return f"{first}, {second}, {first}"


def test_rewritten_function_is_as_before_afterwards() -> None:
    """Whoever has a function by name calls its other code while a mistake is made, and its own code afterwards."""
    shown = _shown
    with pytest.MonkeyPatch.context() as patch:
        rewrite(patch, _shown, "{second}", "{second + 1}")
        assert shown(1, 2) == "1, 3, 1"

    assert shown(1, 2) == "1, 2, 1"


@pytest.mark.parametrize("old", ["{third}", "{first}"])
def test_mistake_in_other_code_is_refused(old: str) -> None:
    """What is to be replaced has to be there, and once."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(DoesNotApply):
        rewrite(patch, _shown, old, "0")

    assert _shown(1, 2) == "1, 2, 1"


def _started_with(address: str) -> subprocess.CompletedProcess[bytes]:
    code = "from kvcached.storage.encryption import cipher; print(len(cipher._context(bytes(1), 0, bytes(1))))"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{EVERY_PROCESS}", VARIABLE: address}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=30, check=False)


def test_every_process_makes_the_mistake() -> None:
    """A process that a test starts has the mistake, too."""
    started = _started_with(encrypted_part_of_any_place.address)

    assert len(cipher._context(bytes(1), 0, bytes(1))) == 4
    assert (started.returncode, started.stdout) == (0, b"2\n")


def test_process_that_cannot_make_the_mistake_ends() -> None:
    """A mistake that cannot be made is not taken for one that no test notices."""
    assert _started_with("tests.mutants.storage:none").returncode == NOT_MADE
