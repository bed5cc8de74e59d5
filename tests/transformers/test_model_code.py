"""Code that a model computes with beside torch and transformers: it counts as weights do, or the model is refused."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from torch.nn.utils import parametrize

from kvcached_client.transformers.weights import identity
from tests.transformers.models import llama
from tests.transformers.test_refusals import refusal

PACKAGE = "code_of_a_model"
ACTIVATION = "import torch\nfrom .{part} import scaled\nclass Act(torch.nn.Module):\n    forward = scaled\n"
SCALED = "def scaled(self, x):\n    return {factor} * x.relu()\n"


@pytest.fixture
def with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes models with a module from a package: its file, and another one that it imports from."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def made(factor: float, part: str = "parts") -> Any:
        folder = tmp_path / PACKAGE
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
        (folder / "layers.py").write_text(ACTIVATION.format(part=part))
        (folder / f"{part}.py").write_text(SCALED.format(factor=factor))
        forget()
        model = llama()
        model.model.layers[0].mlp.act_fn = importlib.import_module(f"{PACKAGE}.layers").Act()
        return model.eval()

    yield made
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
    importlib.invalidate_caches()


def test_edited_code_makes_another_model(with_code: Callable[..., Any]) -> None:
    """With the same weights and configuration, also where the edited file has only been imported from."""
    one = identity(with_code(1.0))
    assert identity(with_code(1.0)) == one
    assert len({one, identity(with_code(30.0)), identity(llama())}) == 3


def test_class_without_a_file_is_refused() -> None:
    """Nothing tells it from another class of the same name."""
    kind = type("Act", (torch.nn.ReLU,), {"__module__": "made_at_a_prompt"})
    model = llama()
    model.model.layers[0].mlp.act_fn = kind()
    with pytest.raises(ValueError, match=r"the class Act of module made_at_a_prompt has no file .*: put it into one"):
        identity(model)


def steer(_module: Any, _inputs: Any, output: Any) -> Any:
    """A forward hook."""
    return output


def test_hooks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward hooks and pre-hooks, of a module or of all; those of torch itself are not."""
    hook: Any = steer
    words = "has a forward hook in model.layers.1.mlp, which the digest of the model does not see"
    for register in (torch.nn.Module.register_forward_hook, torch.nn.Module.register_forward_pre_hook):
        model: Any = llama()
        handle: Any = register(model.model.layers[1].mlp, hook)
        assert words in refusal(model)
        handle.remove()
        assert refusal(model) == ""
    everywhere: Any = torch.nn.modules.module.register_module_forward_hook(hook)
    assert "is run with forward hooks of all modules" in refusal(llama())
    everywhere.remove()
    model = llama()
    spectral_norm: Any = torch.nn.utils.spectral_norm
    spectral_norm(model.model.layers[1].mlp.up_proj)
    assert refusal(model.eval()) == ""


def compiled(call: Any) -> Any:
    """What torch makes of it, without a compiler."""
    compile_: Any = torch.compile
    return compile_(call, backend="eager")


def test_replaced_forward_is_refused() -> None:
    """A function, a method of another class, and a function that torch has compiled; the class's own method is not."""
    words = "has a replaced forward method in model.layers.0.mlp, which the digest of the model does not see"
    for replacement in (lambda x: 30 * x, MethodType(lambda _, x: x, object()), compiled(lambda x: 30 * x)):
        model = llama()
        model.model.layers[0].mlp.forward = replacement
        assert words in refusal(model)
    model = llama()
    model.forward = lambda *_: None
    assert "has a replaced forward method of its own" in refusal(model)
    model = llama()
    model.forward = compiled(model.forward)
    assert refusal(model) == ""


def test_parametrization_is_refused() -> None:
    """Its code makes weights of the parameters that the digest sees."""
    model = llama()
    parametrize.register_parametrization(model.model.layers[0].mlp.up_proj, "weight", torch.nn.Identity())
    assert "has a parametrization in model.layers.0.mlp.up_proj, which its digest does not see" in refusal(model.eval())


#: What accelerate does to a module, of its names that matter here.
ACCELERATE = """
import functools
class AlignDevicesHook: pass
class SequentialHook:
    def __init__(self, *hooks): self.hooks = hooks
def add_hook_to_module(module, hook, old_forward):
    def new_forward(module, *args, **kwargs): return module._old_forward(*args, **kwargs)
    module._hf_hook, module._old_forward = hook, old_forward
    module.forward = functools.update_wrapper(functools.partial(new_forward, module), old_forward)
"""


def test_hooks_of_accelerate_are_accepted() -> None:
    """It moves inputs to the device of a module. What it wraps, and other hooks that it runs, are not its own."""
    names: dict[str, Any] = {"__name__": "accelerate.hooks"}
    exec(ACCELERATE, names)  # noqa: S102 - the text above
    aligns, add = names["AlignDevicesHook"](), names["add_hook_to_module"]

    def hooked(hook: object, forward: Any = None) -> str:
        model = llama()
        mlp = model.model.layers[0].mlp
        add(mlp, hook, forward or mlp.forward)
        return refusal(model)

    assert hooked(aligns) == hooked(names["SequentialHook"](aligns, aligns)) == ""
    assert "has a forward hook in model.layers.0.mlp" in hooked(names["SequentialHook"](aligns, OtherHook()))
    assert "has a replaced forward method" in hooked(aligns, functools.partial(lambda x: x))


class OtherHook:
    """Another one's hook."""
