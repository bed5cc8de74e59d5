"""Which code a model computes with, beside that of torch and transformers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final, NamedTuple

import torch
from blake3 import blake3
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize

from kvcached_client.transformers.code_parts import CodeParts, is_foreign
from kvcached_client.transformers.model import Model

_UNSEEN: Final = "which the digest of the model does not see: write that code into the class of a module, in a file"


class _Call(NamedTuple):
    """What a module runs beside the method of its class.

    Attributes:
        where: the module's name, and that of its attribute.
        words: the same for people, behind the model's name.
        module: that runs it.
        call: what it runs.
    """

    where: str
    words: str
    module: torch.nn.Module
    call: object


def foreign_code(model: Model) -> list[tuple[str, list[str]]]:
    """What tells the code of a model from that of another one, beside the versions of torch and transformers.

    The classes of its modules that come from other packages, with digests of the files that they are made of: the file
    of a class, those of its package whose names it has imported, and so on. Hooks and replaced methods in the same way,
    with the values that they hold.

    Raises:
        ValueError: there is no file of a class, or part of the code cannot be read.
    """
    classes = {each for module in model.modules() for each in type(module).__mro__ if is_foreign(each.__module__)}
    digests = functools.cache(_digests)  # of a quantized model, hundreds of modules have the same code
    found = sorted((each.__qualname__, sorted(digests(each.__module__, _file_of(each)))) for each in classes)
    parts = CodeParts(model)
    for where, _, module, call in _calls(model):
        if code := [text for part in parts.of(module, call) for text in _texts(part, digests)]:
            found.append((where, code))
    return found


def replaced_code(model: Model) -> Iterator[str]:
    """What computes with a model that its digest cannot tell from something else, in words behind the model's name."""
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module):
            place = _place(name)
            yield f"has a parametrization {place}, which its digest does not see: call remove_parametrizations of torch"
    digests = functools.cache(_digests)
    parts = CodeParts(model)
    for _, words, module, call in _calls(model):
        try:
            for part in parts.of(module, call):
                _texts(part, digests)
        except ValueError:
            yield f"{words}, {_UNSEEN}"


def _calls(model: Model) -> Iterator[_Call]:
    """Hooks and replaced methods of a model's modules."""
    for name, module in model.named_modules():
        if (forward := vars(module).get("forward")) is not None:
            yield _Call(f"{name}.forward", f"has a replaced forward method {_place(name)}", module, forward)
        for attribute, hook in (*_hooks(vars(module), "_forward"), *_of_accelerate(module)):
            yield _Call(f"{name}.{attribute}", f"has a forward hook {_place(name)}", module, hook)
    for attribute, hook in _hooks(vars(torch_module), "_global_forward"):
        yield _Call(attribute, "is run with forward hooks of all modules", model, hook)


def _place(name: str) -> str:
    return f"in {name}" if name else "of its own"


def _hooks(names: Mapping[str, Any], kind: str) -> Iterator[tuple[str, object]]:
    """What torch runs before and after forward methods. It has no names for them that are not its own."""
    for name in (f"{kind}_pre_hooks", f"{kind}_hooks"):
        for hook in names[name].values():
            yield name, hook


def _of_accelerate(module: torch.nn.Module) -> Iterator[tuple[str, object]]:
    """The hooks that accelerate runs before and after a module's forward method, also those made by others."""
    name = "_hf_hook"
    if (hook := vars(module).get(name)) is not None:
        yield from ((name, each) for each in getattr(hook, "hooks", (hook,)))


def _texts(part: object, digests_of: Callable[[str, Path], set[str]]) -> list[str]:
    """A part of a hook or a method, in words and digests.

    Raises:
        ValueError: it cannot be read, or has no file.
    """
    if isinstance(part, FunctionType):
        code = part.__code__
        digests = digests_of(str(part.__globals__.get("__name__")), Path(code.co_filename))
        return [code.co_qualname, str(code.co_firstlineno), *sorted(digests)]  # decorators change names of functions
    if isinstance(part, type):
        return [part.__qualname__, *sorted(digests_of(part.__module__, _file_of(part)))]
    return [repr(part)]


def _file_of(kind: type) -> Path:
    if (file := _file(sys.modules.get(kind.__module__))) is None:
        raise ValueError(
            f"the class {kind.__qualname__} of module {kind.__module__} has no file that tells its code from that "
            "of another class: put it into one"
        )
    return file


def _file(module: ModuleType | None) -> Path | None:
    file = Path(getattr(module, "__file__", None) or "")
    return file if file.is_file() else None


def _digests(name: str, file: Path) -> set[str]:
    """Of a file of this module, and of those of its package whose names the module has imported, and so on."""
    package = name.partition(".")[0]
    files, reached, waiting = {file}, {name}, [name]
    while waiting:
        if (module := sys.modules.get(waiting.pop())) is None:
            continue  # classes may say that they are from a module that nobody has imported
        if (found := _file(module)) is not None:
            files.add(found)
        own = {each for each in _imported(module) if each.partition(".")[0] == package} - reached
        reached.update(own)
        waiting.extend(own)
    return {blake3(_content(each)).hexdigest() for each in files}


def _content(file: Path) -> bytes:
    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    return file.read_bytes()


def _imported(module: ModuleType) -> Iterator[str]:
    """The modules that a module's names come from."""
    for name, value in list(vars(module).items()):
        if isinstance(value, ModuleType):
            # Python gives a package a name for each of its modules that anyone imports: they say nothing about it.
            if not (hasattr(module, "__path__") and sys.modules.get(f"{module.__name__}.{name}") is value):
                yield value.__name__
        elif isinstance(origin := getattr(value, "__module__", None), str):
            yield origin
