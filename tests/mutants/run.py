"""Breaks the code in known ways, one at a time, and checks that the test named for each notices.

    python -m tests.mutants.run [NAME...]

Works in copies of the working tree. One line per mutant; exit status 1 if a named test fails without its mutant, if a
mutant survives, or if one does not apply any more.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.patches import DoesNotApply, Mutant, mutants, mutate

ROOT = Path(__file__).parents[2]
COPIES = 2
#: Of one test. A mutant that hangs its test has been noticed too.
TEST_SECONDS_MAX = 60
#: pytest's exit status when tests ran, and some failed.
TESTS_FAILED = 1


def source_files() -> list[str]:
    """What belongs to the working tree: tracked files, and new ones that git does not ignore."""
    git = shutil.which("git") or "git"
    listed = subprocess.run(
        [git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    return [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def copy_tree(files: Iterable[str], target: Path) -> Path:
    """Copy the files to a folder of their own."""
    for name in files:
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, place)
    return target


def run_tests(tree: Path, tests: Iterable[str]) -> int | None:
    """Pytest's exit status; None where it did not end in time."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, timeout=TEST_SECONDS_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return done.returncode


def outcome(mutant: Mutant, tree: Path) -> str:
    """What became of a mutant in a copy of the tree, which is as before afterwards."""
    try:
        changed = mutate(mutant, tree)
    except DoesNotApply:
        return "does not apply"
    kept = {path: path.read_text() for path in changed}
    try:
        for path, text in changed.items():
            path.write_text(text)
        status = run_tests(tree, [mutant.test])
    finally:
        for path, text in kept.items():
            path.write_text(text)
    if status in {TESTS_FAILED, None}:
        return "caught"
    return "SURVIVED" if status == 0 else f"pytest ended with {status}"


def outcomes(chosen: list[Mutant], trees: list[Path]) -> Iterator[tuple[Mutant, str]]:
    """Each mutant and what became of it, in order; several at a time, one per copy of the tree."""
    idle: SimpleQueue[Path] = SimpleQueue()
    for tree in trees:
        idle.put(tree)

    def judge(mutant: Mutant) -> str:
        tree = idle.get()
        try:
            return outcome(mutant, tree)
        finally:
            idle.put(tree)

    with ThreadPoolExecutor(len(trees)) as pool:
        yield from zip(chosen, pool.map(judge, chosen), strict=True)


def main(names: list[str]) -> int:
    """Run them all, or those named."""
    chosen = [mutant for mutant in mutants() if not names or mutant.name in names]
    files = source_files()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [copy_tree(files, Path(folder) / str(index)) for index in range(COPIES)]
        if status := run_tests(trees[0], sorted({mutant.test for mutant in chosen})):
            sys.stdout.write(f"without a mutant the tests must pass; pytest ended with {status}\n")
            return 1
        bad = 0
        for mutant, result in outcomes(chosen, trees):
            bad += result != "caught"
            sys.stdout.write(f"{result:<15} {mutant.name}: {mutant.breaks}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - bad} of {len(chosen)} mutants caught\n")
    return int(bool(bad) or not chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
