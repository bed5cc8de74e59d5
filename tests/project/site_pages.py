"""Makes the site of the documents, and refuses what a reader without a network, or with an old link, would miss.

    python -m tests.project.site_pages FOLDER

Needs Sphinx: `make docs` installs it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.project.reference_pages import dead_links
from tests.project.source_tree import ROOT

#: What a browser loads for a page by itself, while a link is followed by its reader only.
_LOADED = re.compile(r'<(?:script|img|iframe|source)\b[^>]*\bsrc="([^"]+)"|<link\b[^>]*\bhref="([^"]+)"')


def main(folder: Path) -> int:
    """Make the pages; exit status 1 if Sphinx warns, a link leads nowhere, or a page loads from another host."""
    options = ["--quiet", "--fail-on-warning", "--fresh-env", "--doctree-dir", str(folder.with_name("site-doctrees"))]
    sphinx = [sys.executable, "-m", "sphinx", *options, "--conf-dir", "docs/site", ".", str(folder.absolute())]
    if subprocess.run(sphinx, cwd=ROOT, check=False).returncode:
        return 1
    problems = [f"dead link: {link}" for link in sorted(set(dead_links(folder)))]
    problems += [f"needs another host: {each}" for each in foreign(folder)]
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    return 1 if problems else 0


def foreign(folder: Path) -> Iterator[str]:
    """What the pages of a folder load from other hosts."""
    for path in sorted(folder.rglob("*.html")):
        for source in _LOADED.findall(path.read_text()):
            address = "".join(source)
            if re.match(r"(\w+:)?//", address):
                yield f"{path.relative_to(folder)}: {address}"
    for path in sorted(folder.rglob("*.css")):
        for address in re.findall(r"url\(['\"]?((?:https?:)?//[^)'\"]+)", path.read_text()):
            yield f"{path.relative_to(folder)}: {address}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
