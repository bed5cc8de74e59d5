"""What the KV of a model is: its shape, and whose it is."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import torch
import transformers
from blake3 import blake3
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvcached_client.keys import encode_fields

#: transformers is untyped here.
Model: TypeAlias = Any

#: Of a configuration, what says nothing about the KV: two downloads of the same files share blocks.
_IRRELEVANT: Final = frozenset({"_name_or_path", "transformers_version"})
#: Parts of configurations of models that also take images or sound, which the tokens do not tell of.
_OTHER_INPUTS: Final = ("vision_config", "audio_config")


class KvTensor(NamedTuple):
    """Keys or values of one layer, as a cache holds them: [1, heads, tokens, numbers].

    Attributes:
        heads: heads.
        numbers: of one head and token.
        dtype: of each.
        device: where they are.
    """

    heads: int
    numbers: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.heads * self.numbers * self.dtype.itemsize


def kv_tensors(model: Model) -> list[KvTensor]:
    """Keys and values of each layer, by turns: seen where the model computes one token.

    Raises:
        ValueError: the model cannot be served, and why.
    """
    _check(model)
    cache = DynamicCache(config=model.config)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model(token, use_cache=True, **{_cache_argument(model): cache})
    for number, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:
            raise ValueError(
                f"layer {number} of {type(model).__name__} keeps a {type(layer).__name__}: "
                "only models whose layers all have full attention can be served"
            )
    return [KvTensor(each.shape[1], each.shape[3], each.dtype, each.device) for each in tensors_of(cache)]


def _cache_argument(model: Model) -> str:
    """Which argument takes a cache: `cache` since transformers 5.24, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _check(model: Model) -> None:
    """Raise ValueError where equal tokens need not have equal KV."""
    name = type(model).__name__
    if model.training:
        raise ValueError("the model is in training mode, in which it computes something else: call model.eval()")
    if any(getattr(model.config, each, None) is not None for each in _OTHER_INPUTS):
        raise ValueError(f"{name} also takes images or sound, which the tokens of a prompt do not name")
    if getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(f"{name} has adapters that may be switched while it runs: merge them (merge_and_unload)")
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)  # of the whole model, or of each kind of layer
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind and ("dynamic" in kind or kind == "longrope"):
                raise ValueError(
                    f"{name} has rotary embeddings of kind {kind}: its keys depend on the text behind them"
                )


def tensors_of(cache: DynamicCache) -> list[torch.Tensor]:
    """Keys and values of each layer of a cache, by turns; none of layers that hold nothing yet."""
    layers: list[Any] = cache.layers
    return [each for layer in layers if layer.is_initialized for each in (layer.keys, layer.values)]


def identity(model: Model) -> bytes:
    """32 bytes, the same for two models only if equal tokens have equal KV: a digest of weights and configuration.

    Reads all weights once, at about the speed of memory where they are on the CPU.
    """
    config = {name: value for name, value in model.config.to_dict().items() if name not in _IRRELEVANT}
    digest = blake3(
        encode_fields(
            "kvcached transformers v1",
            type(model).__name__,
            json.dumps(config, sort_keys=True, default=str),
            str(getattr(model.config, "_attn_implementation", "")),
            transformers.__version__,
            torch.__version__,
        ),
        max_threads=blake3.AUTO,
    )
    for name, tensor in _weights(model):
        digest.update(encode_fields(name, str(tensor.dtype), json.dumps(list(tensor.shape)), tensor.device.type))
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _weights(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, those included that are not saved."""
    yield from model.named_parameters()
    yield from model.named_buffers()
