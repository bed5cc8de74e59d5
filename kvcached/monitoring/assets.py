"""The files of the status page, as they are served: what a browser may do with them, and no more."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from typing import Final

from kvcached.server.http import Page

_FOLDER: Final = Path(__file__).parent / "page"
#: The file at ``/``. All others are below `_FILES_AT`, where it looks for them.
_START: Final = "index.html"
_FILES_AT: Final = "/page/"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
#: Nothing from elsewhere, nothing to elsewhere, nothing inline, no text of a peer taken for HTML, in nobody's frame.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
#: A newer daemon's page asks for its own files.
_HEADERS: Final = (
    ("content-security-policy", _POLICY),
    ("cache-control", "no-cache"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
)


def load_assets() -> dict[str, Page]:
    """Every file by the path where it is served. They are read once: an upgrade changes them when the daemon starts."""
    return {
        "/" if file.name == _START else f"{_FILES_AT}{file.name}": Page(
            HTTPStatus.OK, file.read_bytes(), _TYPES[file.suffix], _HEADERS
        )
        for file in sorted(_FOLDER.iterdir())
        if file.suffix in _TYPES
    }
