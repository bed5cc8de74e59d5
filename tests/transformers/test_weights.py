"""The digest of a model's weights: another one for each way in which they may differ, or none at all."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from blake3 import blake3

from kvcached_client.transformers import weights
from kvcached_client.transformers.weights import identity
from tests.transformers.models import llama


def tied(to: int) -> Any:
    """A model whose last layer has the keys' weights of an earlier one."""
    model = llama(num_hidden_layers=3)
    model.model.layers[2].self_attn.k_proj.weight = model.model.layers[to].self_attn.k_proj.weight
    return model


class WithState(torch.nn.Linear):
    """Saves something that is neither a parameter nor a buffer."""

    def __init__(self, state: object) -> None:
        super().__init__(32, 32, bias=False)
        self.state = state

    def get_extra_state(self) -> object:
        return self.state

    def set_extra_state(self, state: object) -> None:
        self.state = state


def with_state(state: object) -> Any:
    """A model with a part that has a state of its own, and the weights of any other such model."""
    torch.manual_seed(1)
    model = llama()
    model.model.layers[0].self_attn.q_proj = WithState(state)
    return model


class Wrapped(torch.Tensor):
    """Has no bytes of its own, as quantized weights of torchao have none."""

    @classmethod
    def __torch_dispatch__(cls, _function: Any, _types: Any, args: Any = (), _kwargs: Any = None) -> Any:  # type: ignore[override]
        return wrapped(args[0].shape)


def wrapped(shape: torch.Size) -> Any:
    make: Any = torch.Tensor._make_wrapper_subclass
    return make(Wrapped, shape, dtype=torch.float32)


def test_ways_of_tying_weights_differ() -> None:
    """Layers that share weights with the first or with the second layer are two models."""
    assert identity(tied(0)) != identity(tied(1))
    assert identity(tied(0)) == identity(tied(0))


def test_dynamically_quantized_model_is_refused() -> None:
    """Its weights are in packed parameters that have no bytes to read: two fine-tunes would have one digest."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize: Any = torch.ao.quantization.quantize_dynamic
        model = quantize(llama(), {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ValueError, match=r"_packed_params.* is no plain tensor but a .*without this kind"):
        identity(model)


def test_saved_state_counts() -> None:
    """What a module saves beside its parameters and buffers is part of the digest, or refused if it is no tensor."""
    one, other = (identity(with_state(torch.full((2,), float(number)))) for number in (1, 2))
    assert one != other
    with pytest.raises(ValueError, match=r"_extra_state is no plain tensor but a dict"):
        identity(with_state({"scale": 1.0}))


def test_weights_with_other_bytes_are_refused() -> None:
    """A tensor that wraps others is no plain tensor, nor is a sparse one."""
    model = llama()
    linear = model.model.layers[0].mlp.down_proj
    linear.weight = torch.nn.Parameter(wrapped(linear.weight.shape))
    with pytest.raises(ValueError, match=r"mlp.down_proj.weight is no plain tensor but a Wrapped"):
        identity(model)
    model = llama()
    model.register_buffer("mask", torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match=r"mask is no plain tensor"):
        identity(model)


def test_digest_of_an_ordinary_model_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter, then each buffer, is counted once, with what describes it and its bytes."""
    model = llama(3)
    hashed: list[bytes] = []

    class Recorded:
        def __init__(self, data: bytes, **_: object) -> None:
            self.update(data)

        def update(self, data: Any) -> None:
            hashed.append(bytes(data))

        def digest(self) -> bytes:
            return blake3(b"".join(hashed)).digest()

        AUTO = 1

    expected = identity(model)
    monkeypatch.setattr(weights, "blake3", Recorded)
    assert identity(model) == expected
    tensors = [*model.named_parameters(), *model.named_buffers()]
    assert len(hashed) == 1 + 2 * len(tensors)
    assert hashed[2::2] == [each.detach().numpy().tobytes() for _, each in tensors]
