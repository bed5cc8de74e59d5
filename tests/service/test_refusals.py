"""The core refuses with values; the service has words for each of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

import pytest

import kvcached.core
from kvcached.core.refusals import Refusal, Why
from kvcached.service.refusals import WORDS, in_words

CORE = Path(kvcached.core.__file__).parent


def fields(message: str) -> set[str]:
    """The names of the values that a message has a place for."""
    return {name for _, name, _, _ in Formatter().parse(message) if name is not None}


def raised() -> Iterator[tuple[Why, set[str] | None]]:
    """Every refusal in the core's source, with the names of its values; None where they come as a whole."""
    for path in sorted(CORE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Refusal":
                (why,) = node.args
                assert isinstance(why, ast.Attribute)
                names = {each.arg for each in node.keywords if each.arg is not None}
                yield Why[why.attr], None if len(names) < len(node.keywords) else names


@pytest.mark.parametrize("why", Why, ids=lambda why: why.name)
def test_every_refusal_has_words(why: Why) -> None:
    """Each reason has a message with the values it is about, and says what to do; engines get its code."""
    message, fix = WORDS[why]
    error = in_words(Refusal(why, **dict.fromkeys(fields(message), 7)))

    assert (error.code, error.fix) == (why.code, fix)
    assert "{" not in error.message
    assert fix


def test_refusals_carry_what_their_words_name() -> None:
    """Wherever the core refuses, it gives exactly the values that the message has a place for."""
    found = list(raised())

    assert {why for why, _ in found} == set(Why)
    assert [(why, names) for why, names in found if names is not None and names != fields(WORDS[why][0])] == []
