"""What hooks and replaced methods of a model's modules are made of."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Final

import torch

from kvcached_client.transformers.model import Model

#: Packages whose versions say what they compute.
_KNOWN: Final = frozenset({"torch", "transformers"})
#: Its hooks and replaced methods compute the same, elsewhere.
_HARMLESS: Final = "accelerate"
#: Names under which torch and decorators keep what they have wrapped.
_WRAPPED: Final = ("_torchdynamo_orig_callable", "__wrapped__")
#: What is told from another value by what it prints.
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def is_foreign(name: str) -> bool:
    """Whether a module's code is not told by the versions of torch, transformers and Python."""
    package = name.partition(".")[0]
    return package not in _KNOWN and package not in sys.stdlib_module_names


class CodeParts:
    """Finds what hooks and methods of a model consist of, down to what their functions hold from outside of them."""

    def __init__(self, model: Model) -> None:
        named = itertools.chain(model.named_modules(), model.named_parameters(), model.named_buffers())
        self._names = {id(each): name for name, each in named}

    def of(self, module: torch.nn.Module, call: object) -> Iterator[object]:
        """Functions and classes from elsewhere, and plain values, that tell what a module calls from other code.

        Of a call that computes what the class of the module does, there are none.

        Raises:
            ValueError: part of it cannot be told from something else.
        """
        seen: dict[int, object] = {}  # by identity, and kept, so that no other object gets it
        waiting = [call]
        while waiting:
            part = waiting.pop()
            if isinstance(part, _PLAIN):
                yield part
            elif id(part) not in seen:
                seen[id(part)] = part
                shown, held = self._read(part, module)
                yield from shown
                waiting.extend(reversed(held))

    def _read(self, part: object, module: torch.nn.Module) -> tuple[list[object], list[object]]:
        """What tells a part from another one, and what it holds."""
        if isinstance(part, torch.nn.Module | torch.Tensor):
            if id(part) not in self._names:
                raise _unreadable(part)  # its numbers are in no digest
            return [] if part is module else [self._names[id(part)]], []
        if isinstance(part, functools.partial):
            return [], [part.func, *part.args, part.keywords, *_wrapped(part)]
        if isinstance(part, MethodType):
            owner: object = part.__self__
            if isinstance(owner, torch.nn.Module) and (own := _own(owner, part.__func__)) is not None:
                return own, [owner]  # which is refused unless it is in the model
            return [], [part.__func__, owner]
        if isinstance(part, FunctionType):
            own = _own(module, part)
            return (own, []) if own is not None else _read_function(part)
        return _read_value(part)


def _own(module: torch.nn.Module, function: object) -> list[object] | None:
    """What tells a method of a module's class, whose code counts, from the class's forward; None of other functions."""
    for kind in type(module).__mro__:
        for name, value in vars(kind).items():
            if function is value or function is getattr(value, "__func__", None):
                return [] if function is getattr(type(module), "forward", None) else [kind.__qualname__, name]
    return None


def _read_function(function: FunctionType) -> tuple[list[object], list[object]]:
    name = str(function.__globals__.get("__name__"))
    wrapped = _wrapped(function)
    package = name.partition(".")[0]
    if package == _HARMLESS:
        return [], wrapped
    if package in _KNOWN:
        # The hooks of transformers change no results: they keep outputs for the caller, who may want them or not.
        is_told = not wrapped and (package == "torch" or function.__code__.co_name == "forward")
        return [f"{name}.{function.__code__.co_qualname}"] if is_told else [], wrapped
    held = [function.__defaults__, function.__kwdefaults__, *wrapped]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # nothing has been assigned yet
            continue
    return [function] if is_foreign(name) else [], held


def _wrapped(call: object) -> list[object]:
    return [each for name in _WRAPPED if (each := getattr(call, name, None)) is not None]


def _read_value(value: object) -> tuple[list[object], list[object]]:
    if isinstance(value, BuiltinFunctionType):
        if is_foreign(value.__module__ or ""):
            raise _unreadable(value)
        return [value.__qualname__], []
    if (items := _items(value)) is not None:
        return [], items
    kind = value if isinstance(value, type) else type(value)
    if is_foreign(kind.__module__):
        return _read_foreign(value, kind)
    name = getattr(value, "__name__", "")  # of an operator of torch
    return [kind.__qualname__, name], [] if value is kind else _wrapped(value)


def _items(value: object) -> list[object] | None:
    """What a container holds; None of something else."""
    if isinstance(value, dict):
        return [each for item in value.items() for each in item]
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return list(value) if isinstance(value, list | tuple) else None


def _read_foreign(value: object, kind: type) -> tuple[list[object], list[object]]:
    """Of a class from elsewhere, or of an object of it."""
    if kind.__module__.partition(".")[0] == _HARMLESS:
        return [], _wrapped(value)
    if value is kind:
        return [kind], []
    if not hasattr(value, "__dict__"):
        raise _unreadable(value)
    return [kind], [vars(value)]


def _unreadable(value: object) -> ValueError:
    return ValueError(f"a {type(value).__name__} cannot be told from another one")
