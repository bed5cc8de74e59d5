"""The docstrings of the SDK, of which `make reference` makes a page: what they refer to is on that page."""

from __future__ import annotations

import builtins
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import kvcached_client
from tests.project.reference_pages import MODULES, dead_links

NAMES = {name: getattr(kvcached_client, name) for name in kvcached_client.__all__}


def docstrings() -> Iterator[tuple[str, str]]:
    """Every docstring of the page, by the name of what it describes."""
    for name, value in NAMES.items():
        if not getattr(value, "__module__", "").startswith("kvcached_client"):
            continue
        yield name, inspect.getdoc(value) or ""
        for member, attribute in inspect.getmembers(value) if inspect.isclass(value) else ():
            if not member.startswith("_") and (inspect.isroutine(attribute) or isinstance(attribute, property)):
                yield f"{name}.{member}", inspect.getdoc(attribute) or ""


def has(kind: object, member: str) -> bool:
    """Whether a class has a member, or sets it when an object is made."""
    if hasattr(kind, member) or not inspect.isclass(kind):
        return hasattr(kind, member)
    sources = (inspect.getsource(base) for base in kind.__mro__ if base.__module__.startswith("kvcached_client"))
    return any(re.search(rf"self\.{member}\b", source) for source in sources)


def is_there(reference: str) -> bool:
    """Whether a reader of the page finds what is in backquotes: a class or an exception, and its member."""
    first, _, member = reference.partition(".")
    kind = NAMES.get(first, getattr(builtins, first, None))
    return kind is not None and (not member or has(kind, member))


def test_docstrings_refer_to_what_the_page_has() -> None:
    """A class in a public docstring, or its member, is public, so that it becomes a link, and it is no old name."""
    found = [
        (owner, reference)
        for owner, text in docstrings()
        for reference in re.findall(r"(?<!`)`([A-Z][a-z]\w*(?:\.\w+)?)`(?!`)", text)
    ]
    assert ("AsyncClient.match", "Client.match") in found
    assert [each for each in found if not is_there(each[1])] == []


def test_pages_are_of_modules_that_are_there() -> None:
    """`make reference` is about modules of the client, among them each that a public docstring refers to."""
    for module in MODULES:
        assert importlib.util.find_spec(module) is not None, module
    referred = {
        reference for _, text in docstrings() for reference in re.findall(r"`(kvcached_client(?:\.[a-z_]+)+)`", text)
    }
    assert referred <= set(MODULES)


def test_links_to_nothing_are_found(tmp_path: Path) -> None:
    """A page that is not there, and a place that no page has, are dead; others are not."""
    (tmp_path / "a.html").write_text('<a id="x" href="#x"><a href="b/c.html#y"><a href="https://e"><a href="#z">')
    (tmp_path / "b").mkdir()
    (tmp_path / "b/c.html").write_text('<p id="y"><a href="../a.html#x"><a href="d.html">')
    assert sorted(dead_links(tmp_path)) == ["a.html: #z", "b/c.html: d.html"]
