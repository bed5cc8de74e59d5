"""The documents as a site: `make docs`.

Sources are the documents where they stand in the tree, so that their relative links work on the site and on a code
host alike. The build is strict: a broken link or anchor, and a page outside the navigation, fail it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from sphinx.application import Sphinx

project = "kvcached"
copyright = "the authors of kvcached"  # noqa: A001 - Sphinx reads this name
language = "en"
root_doc = "README"
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/decisions/*.md",
    "benchmarks/**.md",
    "examples/**.md",
    "tests/cuda_driver/README.md",
]
exclude_patterns = [".*", "build", "dist", "configs", "kvcached", "kvcached_client", "docs/site", "**/__pycache__"]

extensions = ["myst_parser"]
myst_heading_anchors = 4  # as code hosts make them
smartquotes = False  # "--json" stays as it is written
highlight_language = "none"  # of blocks that name no language
suppress_warnings = ["misc.highlighting_failure"]  # excerpts with an ellipsis are no whole program

html_theme = "furo"
html_title = "kvcached"
html_favicon = "../../kvcached/monitoring/page/icon.svg"
html_copy_source = False
html_use_index = False

_HERE = Path(__file__).parent
#: What the site has below these pages, and a code host has not.
_NAVIGATION = {
    "README": (_HERE / "navigation.txt").read_text(encoding="utf-8"),
    "docs/decisions/README": "```{toctree}\n:glob:\n\n[0-9]*\n```\n",
}


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _add_navigation)
    app.connect("build-finished", _make_start_page)


def _add_navigation(_app: Sphinx, page: str, text: list[str]) -> None:
    text[0] += f"\n{_NAVIGATION.get(page, '')}"


def _make_start_page(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        shutil.copyfile(Path(app.outdir, "README.html"), Path(app.outdir, "index.html"))
