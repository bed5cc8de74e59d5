"""Which code a model computes with, beside that of torch and transformers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from blake3 import blake3
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize

from kvcached_client.transformers.model import Model

#: Packages whose versions say what they compute.
_KNOWN: Final = frozenset({"torch", "transformers"})
#: Packages whose hooks and replaced methods compute the same: elsewhere, or faster.
_HARMLESS: Final = _KNOWN | {"accelerate", "kernels"}
_UNSEEN: Final = "which the digest of the model does not see: write that code into the class of a module, in a file"


def foreign_code(model: Model) -> list[tuple[str, list[str]]]:
    """The classes of a model's modules that come from other packages, and digests of the files that they are made of.

    These are the file of a class, those of its package whose names it has imported, and so on.

    Raises:
        ValueError: there is no file of a class.
    """
    classes = {each for module in model.modules() for each in type(module).__mro__ if _is_foreign(each)}
    return sorted((each.__qualname__, sorted(_digests(each))) for each in classes)


def replaced_code(model: Model) -> Iterator[str]:
    """What changes the results of the classes of a model's modules, in words behind the model's name."""
    for name, module in model.named_modules():
        place = f"in {name}" if name else "of its own"
        if parametrize.is_parametrized(module):
            yield f"has a parametrization {place}, which its digest does not see: call remove_parametrizations of torch"
        if not _is_known(module, vars(module).get("forward")):
            yield f"has a replaced forward method {place}, {_UNSEEN}"
        for hook in (*_hooks(vars(module), "_forward"), *_of_accelerate(module)):
            if not _is_known(module, hook):
                yield f"has a forward hook {place}, {_UNSEEN}"
    for hook in _hooks(vars(torch_module), "_global_forward"):
        if not _is_known(model, hook):
            yield f"is run with forward hooks of all modules, {_UNSEEN}"


def _is_foreign(kind: type) -> bool:
    package = kind.__module__.partition(".")[0]
    return package not in _KNOWN and package not in sys.stdlib_module_names


def _digests(kind: type) -> set[str]:
    found, reached, waiting = set(), {kind.__module__}, [kind.__module__]
    while waiting:
        module = sys.modules.get(waiting.pop())
        file = Path(getattr(module, "__file__", None) or "")
        if file.is_file():
            found.add(blake3(file.read_bytes()).hexdigest())
        elif not found:
            raise ValueError(
                f"the class {kind.__qualname__} of module {kind.__module__} has no file that tells its code from that "
                "of another class: put it into one"
            )
        names = {_origin(each) for each in vars(module).values()} - reached
        own = [name for name in names if name.partition(".")[0] == kind.__module__.partition(".")[0]]
        reached.update(own)
        waiting.extend(own)
    return found


def _origin(value: object) -> str:
    """The module that something is, or where it is defined; "" where nothing says so."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    return name if isinstance(name, str) else ""


def _hooks(names: Mapping[str, Any], kind: str) -> Iterator[object]:
    """What torch runs before and after forward methods. It has no names for them that are not its own."""
    for name in (f"{kind}_pre_hooks", f"{kind}_hooks"):
        yield from names[name].values()


def _of_accelerate(module: torch.nn.Module) -> tuple[Any, ...]:
    """The hooks that accelerate runs before and after a module's forward method, also those made by others."""
    hook = vars(module).get("_hf_hook")
    return () if hook is None else tuple(getattr(hook, "hooks", (hook,)))


def _is_known(module: torch.nn.Module, call: object) -> bool:
    """Whether code belongs to the class of a module or to a harmless package, with all that it is wrapped around."""
    wrapped: list[object] = []
    if isinstance(call, functools.partial):
        wrapped.append(call.func)
    elif (function := getattr(call, "__func__", None)) is not None:  # of a bound method
        return _is_known(module, function)
    elif call is None or any(vars(each).get("forward") is call for each in type(module).__mro__):
        return True
    elif _package(call) not in _HARMLESS:
        return False
    wrapped += [getattr(call, name, None) for name in ("_torchdynamo_orig_callable", "__wrapped__")]
    return all(_is_known(module, each) for each in wrapped)


def _package(call: object) -> str:
    """Where a function was written, whatever it calls itself; of an object, where its class was."""
    names = getattr(call, "__globals__", None)
    name: str = type(call).__module__ if names is None else names.get("__name__", "")
    return name.partition(".")[0]
