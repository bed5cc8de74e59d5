"""A mutant: a deliberate mistake in the product, with the one test that must notice it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from tests.simulation.mistake import Make

#: Of the environment: the address of the mutant that processes make.
VARIABLE = "MUTANT"
#: Exit status of a process that could not make it. pytest has none so high.
NOT_MADE = 70


class DoesNotApply(Exception):
    """The code that a mutant breaks has changed: make the mistake anew."""


@dataclass(frozen=True)
class Mutant:
    """A mistake.

    Attributes:
        test: node id of the test that must fail, as pytest takes it.
        make: puts the mistake into the product; its docstring says what it breaks.
    """

    test: str
    make: Make

    @property
    def name(self) -> str:
        return self.make.__name__

    @property
    def breaks(self) -> str:
        return inspect.getdoc(self.make) or ""

    @property
    def address(self) -> str:
        """Where another process finds it."""
        return f"{self.make.__module__}:{self.name}"

    @contextmanager
    def made(self) -> Iterator[None]:
        """While the block runs."""
        with pytest.MonkeyPatch.context() as patch:
            self.make(patch)
            yield


def caught_by(test: str) -> Callable[[Make], Mutant]:
    """Decorate a function that makes a mistake: the test must fail with it, and passes without."""
    return lambda make: Mutant(test, make)


def found_at(address: str) -> Mutant:
    """The mutant with an address."""
    module, _, name = address.partition(":")
    mutant = getattr(import_module(module), name)
    assert isinstance(mutant, Mutant)
    return mutant


def rewrite(patch: pytest.MonkeyPatch, function: Callable[..., Any], old: str, new: str) -> None:
    """Put other text into a function's source.

    The function keeps its identity and gets other code, so that whoever has imported it by name makes the mistake, too.

    Args:
        patch: undoes it.
        function: of a module or a class; also what a property, or a decorator that says what it wraps, is made of.
        old: part of a line, or lines, whatever their indentation; the function has it exactly once.
        new: further lines are indented from the line in which `old` begins.

    Raises:
        DoesNotApply: `old` is not there, or more than once.
    """
    plain = _plain(function)
    lines, first = inspect.getsourcelines(plain)
    changed = _replaced("".join(lines), old, new, plain.__qualname__)
    path = Path(plain.__code__.co_filename)
    module = path.read_text().splitlines(keepends=True)
    module[first - 1 : first - 1 + len(lines)] = [changed]
    whole = compile("".join(module), str(path), "exec", dont_inherit=True)
    patch.setattr(plain, "__code__", _code(whole, plain.__code__))


def _plain(function: Callable[..., Any] | property) -> FunctionType:
    """The function that was written."""
    found: Any = function.fget if isinstance(function, property) else function
    found = inspect.unwrap(getattr(found, "__func__", found))
    assert isinstance(found, FunctionType)
    return found


def _replaced(source: str, old: str, new: str, name: str) -> str:
    pattern = r"\n *".join(re.escape(line.strip()) for line in old.splitlines())
    places = list(re.finditer(pattern, source))
    if len(places) != 1:
        raise DoesNotApply(f"{len(places)} places in {name} read\n{old}")
    place = places[0]
    line = source[source.rfind("\n", 0, place.start()) + 1 :]
    margin = " " * (len(line) - len(line.lstrip(" ")))
    return source[: place.start()] + new.replace("\n", "\n" + margin) + source[place.end() :]


def _code(whole: CodeType, old: CodeType) -> CodeType:
    """The code of a module's function."""
    inner = [constant for constant in whole.co_consts if isinstance(constant, CodeType)]
    for code in inner:
        if (code.co_qualname, code.co_firstlineno) == (old.co_qualname, old.co_firstlineno):
            return code
        if old.co_qualname.startswith(f"{code.co_qualname}."):
            return _code(code, old)
    raise DoesNotApply(f"no {old.co_qualname} in {old.co_filename}")
