"""Mutants: small breakages of the code, each with the one test that must notice it.

A mutant is a unified diff against the repository behind two header lines: what it breaks, and the test. Its hunks are
applied by what they say, not by line numbers, so that changes elsewhere in a file leave them valid.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent


class Hunk(NamedTuple):
    """Lines of one file, and what they become."""

    path: str
    old: str
    new: str


class Mutant(NamedTuple):
    """One patch file."""

    name: str
    breaks: str
    test: str  #: node id, as pytest takes it
    hunks: list[Hunk]


class DoesNotApply(Exception):
    """The code that a mutant breaks has changed: make the patch anew."""


def mutants() -> list[Mutant]:
    """All of them, by name."""
    return [parse(path.stem, path.read_text()) for path in sorted(FOLDER.glob("*.patch"))]


def parse(name: str, text: str) -> Mutant:
    """Read a patch file."""
    header: dict[str, str] = {}
    hunks: list[Hunk] = []
    path = ""
    for line in text.splitlines(keepends=True):
        if line.startswith("+++ b/"):
            path = line.removeprefix("+++ b/").strip()
        elif line.startswith("@@"):
            hunks.append(Hunk(path, "", ""))
        elif hunks and line[0] in " +-" and not line.startswith("--- a/"):
            last = hunks[-1]
            old, new = line[1:] if line[0] in " -" else "", line[1:] if line[0] in " +" else ""
            hunks[-1] = Hunk(path, last.old + old, last.new + new)
        elif ": " in line and not path:
            key, _, value = line.partition(": ")
            header[key] = value.strip()
    return Mutant(name, header["Breaks"], header["Test"], hunks)


def mutate(mutant: Mutant, root: Path) -> dict[Path, str]:
    """The files of a tree as the mutant makes them; writes nothing.

    Raises:
        DoesNotApply: a hunk's lines are not there, or more than once.
    """
    changed: dict[Path, str] = {}
    for hunk in mutant.hunks:
        path = root / hunk.path
        source = changed[path] if path in changed else path.read_text()
        if source.count(hunk.old) != 1:
            raise DoesNotApply(f"{mutant.name}: {source.count(hunk.old)} places in {hunk.path} read\n{hunk.old}")
        changed[path] = source.replace(hunk.old, hunk.new)
    return changed
