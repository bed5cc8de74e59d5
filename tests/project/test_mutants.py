"""Mutants stay what they are for; `python -m tests.mutants.run`, which .ci/run starts, lets their tests judge them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.patches import DoesNotApply, Hunk, Mutant, mutants, mutate
from tests.project.source_tree import ROOT


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.name)
def test_mutant_applies_and_names_a_test(mutant: Mutant) -> None:
    """Every patch fits the code as it is now, changes it, leaves valid Python, and names a test that exists."""
    for path, text in mutate(mutant, ROOT).items():
        assert text != path.read_text()
        ast.parse(text)
    file, _, test = mutant.test.partition("::")
    names = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}

    assert test.partition("[")[0] in names
    assert mutant.breaks.endswith(".")


def test_there_are_mutants_of_core_and_worker() -> None:
    """Both sides of a transfer are broken in turn."""
    paths = [hunk.path for mutant in mutants() for hunk in mutant.hunks]

    assert {str(Path(path).parent) for path in paths} >= {"kvcached/core", "kvcached/worker"}
    assert len(mutants()) >= 9


@pytest.mark.parametrize("source", ["", "one\ntwo\nthree\n", "two\ntwo\n"])
def test_patch_of_other_code_is_refused(tmp_path: Path, source: str) -> None:
    """A mutant whose lines are gone, or are there twice, does not apply."""
    (tmp_path / "file.py").write_text(source)
    mutant = Mutant("name", "", "", [Hunk("file.py", "two\n", "2\n")])

    if source.count("two") == 1:
        assert mutate(mutant, tmp_path) == {tmp_path / "file.py": "one\n2\nthree\n"}
    else:
        with pytest.raises(DoesNotApply):
            mutate(mutant, tmp_path)
