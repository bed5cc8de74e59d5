"""Which models cannot be served: those where equal tokens need not have equal KV."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Final

import torch

from kvcached_client.transformers.model import Model
from kvcached_client.transformers.model_code import replaced_code

#: Parts of configurations of models that take nothing but tokens.
_PARTS_OF_TEXT_MODELS: Final = frozenset(
    {"text_config", "quantization_config", "attn_config", "ffn_config", "per_layer_config"}
)
#: What the names of settings begin with that only models with other inputs have.
_OTHER_TOKENS: Final = ("image_token", "audio_token", "video_token")
#: Parts of the names of arguments that take other inputs.
_OTHER_INPUTS: Final = ("pixel", "image", "audio", "video", "speech", "input_features", "input_values")
#: Names of modules that attend to what an encoder has computed.
_CROSS_ATTENTION: Final = frozenset({"encoder_attn", "crossattention", "cross_attn"})


def check_model(model: Model) -> None:
    """Raise ValueError for what is no model, and where equal tokens need not have equal KV."""
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise ValueError(
            f"a {type(model).__name__} in place of a model: load one of transformers first, as with "
            "AutoModelForCausalLM.from_pretrained"
        )
    if model.training:
        raise ValueError("the model is in training mode, in which it computes something else: call model.eval()")
    for reason in itertools.chain(_inputs(model), _weights(model), replaced_code(model), _attention(model)):
        raise ValueError(f"{type(model).__name__} {reason}")
    check_precision(model)


def check_precision(model: Model) -> None:
    """Raise ValueError where torch.autocast rounds what the model computes."""
    kind = model.device.type
    if torch.is_autocast_enabled(kind):
        raise ValueError(
            f"torch.autocast is on for {kind}, and rounds the KV: leave it around the model and its PromptCache, "
            "or load the model in the dtype that it is to compute in"
        )


def _inputs(model: Model) -> Iterator[str]:
    """Why the tokens of a prompt are not all that the model takes."""
    config = model.config.to_dict()
    for name, value in config.items():
        is_part = name.endswith("_config") and name not in _PARTS_OF_TEXT_MODELS
        if value is not None and (is_part or name.startswith(_OTHER_TOKENS)):
            yield f"is no model of text alone, as its configuration has {name}: tokens do not name images or sound"
    for name in [model.main_input_name, *inspect.signature(model.forward).parameters]:
        if any(word in name for word in _OTHER_INPUTS):
            yield f"is no model of text alone, as it takes {name}: tokens do not name images or sound"
    if config.get("is_encoder_decoder"):
        yield "has an encoder, whose input the tokens of its decoder do not name"


def _weights(model: Model) -> Iterator[str]:
    """Why the weights may not be those that compute."""
    if getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        yield "has adapters that may be switched while it runs: merge them (merge_and_unload)"
    for name, weight in itertools.chain(model.named_parameters(), model.named_buffers()):
        if weight.device.type == "meta":
            yield f"has weights that are elsewhere, as {name}, which its digest would miss: load it without offloading"


def _attention(model: Model) -> Iterator[str]:
    """Why keys may depend on more than the tokens before them."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in _CROSS_ATTENTION:
            yield f"attends to the output of an encoder, in {name}, which the tokens of a prompt do not name"
        if False in (getattr(module, "is_causal", True), getattr(module, "is_decoder", True)):
            yield (
                f"attends in both directions, in {name}: its keys depend on the text behind them "
                "(models like BERT are decoders with is_decoder=True in their configuration)"
            )
        kinds = getattr(module, "rope_type", None)  # of the whole model, or of each kind of layer
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind and ("dynamic" in kind or kind == "longrope"):
                yield f"has rotary embeddings of kind {kind}: its keys depend on the text behind them"
