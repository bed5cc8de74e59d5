"""Code that a model computes with beside torch and transformers: it counts as weights do, or the model is refused."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, MethodType
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


def test_what_others_have_imported_does_not_count(with_code: Callable[..., Any], tmp_path: Path) -> None:
    """Python names a module in its package as soon as anyone has imported it. Names may also say a wrong module."""
    model = with_code(1.0)
    package = sys.modules[PACKAGE]
    sys.modules[f"{PACKAGE}.layers"].package = package  # type: ignore[attr-defined]
    one = identity(model)
    (tmp_path / PACKAGE / "tools.py").write_text("for_people = 1\n")
    importlib.import_module(f"{PACKAGE}.tools")
    assert hasattr(package, "tools")
    assert identity(model) == one
    package.elsewhere = type("Elsewhere", (), {"__module__": f"{PACKAGE}.of_another_build"})  # type: ignore[attr-defined]
    assert identity(model) == one


def steer(_module: Any, _inputs: Any, output: Any) -> Any:
    """A forward hook."""
    return output


def held(factor: Any) -> Callable[..., Any]:
    """A forward hook that knows something from outside of it."""
    return lambda _module, _inputs, output: factor * output


class Factors:
    """What a hook may hold."""

    def __init__(self, first: object) -> None:
        self.first = first

    def __call__(self, _module: object, _inputs: object, output: object) -> object:
        return output


#: What has no file.
TYPED: Any = eval("lambda *_: None")  # noqa: S307 - the text above


def hooked(hook: Any, layer: int = 1, register: Any = torch.nn.Module.register_forward_hook) -> Any:
    model: Any = llama()
    register(model.model.layers[layer].mlp, hook)
    return model


def test_hooks_count() -> None:
    """Where they are, what they are made of, and the values that they hold; hooks of transformers change nothing."""
    before = torch.nn.Module.register_forward_pre_hook
    counted = [
        *(llama(), hooked(steer), hooked(steer, 0), hooked(steer, 0, before), hooked(held(2.0)), hooked(held(3.0))),
        *(hooked(functools.partial(steer, [4])), hooked(Factors(5)), hooked(Factors({"six": 6}))),
    ]
    assert [refusal(model) for model in counted] == [""] * len(counted)
    assert len({identity(model) for model in counted}) == len(counted)
    assert identity(hooked(held(2.0))) == identity(hooked(held(2.0)))
    model: Any = llama()
    handle = model.model.norm.register_forward_hook(held(model.model.layers[0].mlp.up_proj.weight))
    assert refusal(model) == ""
    handle.remove()
    model.enable_input_require_grads()
    assert identity(model) == identity(llama())
    spectral_norm: Any = torch.nn.utils.spectral_norm
    spectral_norm(model.model.layers[1].mlp.up_proj)
    assert refusal(model.eval()) == ""


def test_hooks_that_cannot_be_read_are_refused() -> None:
    """Those that hold numbers which no digest reads, and those without a file."""
    words = "has a forward hook in model.layers.1.mlp, which the digest of the model does not see"
    tensor = torch.ones(1)
    for hook in (TYPED, held(tensor), held({"a": [tensor]}), held(torch.nn.ReLU()), held(Factors(tensor)), held(TYPED)):
        assert words in refusal(hooked(hook))
        assert words in refusal(hooked(hook, register=torch.nn.Module.register_forward_pre_hook))
    everywhere: Any = torch.nn.modules.module.register_module_forward_hook(TYPED)
    assert "is run with forward hooks of all modules" in refusal(llama())
    everywhere.remove()
    assert refusal(llama()) == ""


OWN = """
import torch
class Act(torch.nn.Module):
    def __init__(self):
        super().__init__()
        {registered}
    @staticmethod
    def alone(module, inputs, output=None): return output
    def after(self, module, inputs, output): return output
    def native(self, x): return x.relu()
    def forward(self, x): return x.relu()
"""


def test_own_methods_count(with_code: Callable[..., Any], tmp_path: Path) -> None:
    """Of the class of a module, as hooks and in the place of its forward method, also where they are in no file."""
    with_code(1.0)
    one = identity(with_act())
    for registered in (
        "self.register_forward_hook(self.after)",
        "self.register_forward_pre_hook(self.alone)",
        "self.forward = self.native",
    ):
        (tmp_path / PACKAGE / "layers.py").write_text(OWN.format(registered=registered))
        forget()
        assert refusal(with_act()) == ""
        assert identity(with_act()) != one
    chosen = with_act()
    del chosen.model.layers[0].mlp.act_fn.forward
    assert identity(chosen) != identity(with_act())
    model = with_act()
    kind: Any = type(model.model.layers[0].mlp.act_fn)
    kind.typed = TYPED
    model.model.layers[0].mlp.act_fn.forward = model.model.layers[0].mlp.act_fn.typed
    assert refusal(model) == ""


def with_act() -> Any:
    model: Any = llama()
    model.model.layers[0].mlp.act_fn = importlib.import_module(f"{PACKAGE}.layers").Act()
    return model.eval()


def compiled(call: Any) -> Any:
    """What torch makes of it, without a compiler."""
    compile_: Any = torch.compile
    return compile_(call, backend="eager")


def with_forward(forward: Any) -> Any:
    model: Any = llama()
    mlp = model.model.layers[0].mlp
    mlp.forward = MethodType(forward, mlp) if isinstance(forward, FunctionType) else forward
    return model


def test_replaced_forward_without_a_file_is_refused() -> None:
    """A function, a method of another object, and a function that torch has compiled; the class's own method is not."""
    words = "has a replaced forward method in model.layers.0.mlp, which the digest of the model does not see"
    for replacement in (TYPED, MethodType(TYPED, object()), compiled(TYPED), torch.nn.ReLU().forward):
        assert words in refusal(with_forward(replacement))
    model: Any = llama()
    model.forward = TYPED
    assert "has a replaced forward method of its own" in refusal(model)
    model = llama()
    model.forward = compiled(model.forward)
    assert refusal(model) == ""
    assert identity(model) == identity(llama())


def test_replaced_forward_counts(with_code: Callable[..., Any]) -> None:
    """As kernels replace it: by a function from a file of another package, which may be edited."""
    seen = {identity(llama()), identity(with_forward(torch.relu)), identity(with_forward(torch.tanh))}
    for factor in (1.0, 1.0, 30.0):
        with_code(factor)
        model = with_forward(sys.modules[f"{PACKAGE}.parts"].scaled)
        assert refusal(model) == ""
        seen.add(identity(model))
    assert len(seen) == 5


class Scheme:
    """How a module is quantized, as compressed-tensors has it."""

    def __init__(self, bits: int) -> None:
        self.bits = bits


def quantize(module: Any, scheme: Scheme) -> None:
    """Wraps a forward method as compressed-tensors does."""
    forward = module.forward.__func__

    @functools.wraps(forward)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert scheme.bits
        return forward.__get__(module, type(self))(*args, **kwargs)

    module.forward = MethodType(wrapped, module)


def test_quantized_forward_counts() -> None:
    """What wraps the class's own method, with what it knows."""
    seen = {identity(llama())}
    for bits in (8, 8, 4):
        model: Any = llama()
        for layer in model.model.layers:
            quantize(layer.mlp.up_proj, Scheme(bits))
        assert refusal(model) == ""
        seen.add(identity(model))
    assert len(seen) == 3


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

    def aligned(hook: object, forward: Any = None) -> Any:
        model = llama()
        mlp = model.model.layers[0].mlp
        add(mlp, hook, forward or mlp.forward)
        return model

    for model in (aligned(aligns), aligned(names["SequentialHook"](aligns, aligns))):
        assert refusal(model) == ""
        assert identity(model) == identity(llama())
    model = aligned(names["SequentialHook"](aligns, Factors(1)))
    assert refusal(model) == ""
    assert identity(model) != identity(llama())
    for hook in (Factors(torch.ones(1)), object.__new__(type("Typed", (), {"__module__": "made_at_a_prompt"}))):
        refused = refusal(aligned(names["SequentialHook"](aligns, hook)))
        assert "has a forward hook in model.layers.0.mlp" in refused
    assert "has a replaced forward method" in refusal(aligned(aligns, functools.partial(TYPED)))
