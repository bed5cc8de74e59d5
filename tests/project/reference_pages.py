"""Makes pages of the docstrings of what engines import, and refuses links that lead nowhere.

    python -m tests.project.reference_pages FOLDER

Needs pdoc: `make reference` installs it.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote

PACKAGE = "kvcached_client"
#: The package itself, and what stays out of it because it needs torch or CUDA.
MODULES = (
    PACKAGE,
    "kvcached_client.errors",
    "kvcached_client.tensors",
    "kvcached_client.cuda.streams",
    "kvcached_client.cuda.gates",
    "kvcached_client.transformers",
)


def main(folder: Path) -> int:
    """Make the pages; exit status 1 if one of them has a link to nothing."""
    pdoc: Any = import_module("pdoc")  # the tests read this file without it
    # Of each type that only type checkers import, pdoc warns that it shows its name.
    warnings.simplefilter("ignore")
    # The SDK's bases are no names of their own: what a class has of them is described with the class.
    pdoc.doc.Class.own_members = property(_members)
    pdoc.doc.Class.inherited_members = property(lambda _: {})
    pdoc.render.configure(docformat="google")
    pdoc.pdoc(*MODULES, output_directory=folder)
    dead = sorted(set(dead_links(folder)))
    for link in dead:
        sys.stderr.write(f"dead link: {link}\n")
    return 1 if dead else 0


def _members(kind: Any) -> list[Any]:
    return [
        member
        for member in kind.members.values()
        if member.taken_from[0].startswith(PACKAGE) and not is_in_steps(member.docstring)
    ]


def is_in_steps(docstring: str) -> bool:
    """Whether a method is the inside of another one, by which its docstring describes it: "`Client.match`."."""
    first = docstring.partition("\n")[0]
    return re.match(r"`[A-Z]\w*\.\w+`", first) is not None or "in steps" in first


def dead_links(folder: Path) -> Iterator[str]:
    """Links of the pages of a folder to a file, or to a place in one of the pages, that is not there."""
    pages = {path.resolve(): path.read_text() for path in folder.rglob("*.html")}
    places = {path: set(re.findall(r'id="([^"]+)"', page)) for path, page in pages.items()}
    for path, page in pages.items():
        for link in re.findall(r'href="([^"]+)"', page):
            if link.startswith(("http", "$")):  # "$": filled in by the page's search
                continue
            file, _, place = unquote(link).partition("#")
            target = (path.parent / file.partition("?")[0]).resolve() if file else path
            if not target.exists() or (place and place not in places.get(target, ())):
                yield f"{path.relative_to(folder.resolve())}: {link}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
