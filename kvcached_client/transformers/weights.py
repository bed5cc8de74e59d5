"""Whose KV it is: a digest of a model's weights, configuration and code."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Final

import torch
import transformers
from blake3 import blake3

from kvcached_client.keys import encode_fields
from kvcached_client.transformers.model import Model
from kvcached_client.transformers.model_code import foreign_code

#: Of a configuration, what says nothing about the KV: two downloads of the same files share blocks.
_IRRELEVANT: Final = frozenset({"_name_or_path", "transformers_version"})


def identity(model: Model) -> bytes:
    """32 bytes, the same for two models only if equal tokens have equal KV.

    A digest of weights, configuration and code. Reads all weights once, at about the speed of memory where they are on
    the CPU.

    Raises:
        ValueError: the model has weights, or code, that cannot be read.
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
    if code := foreign_code(model):
        digest.update(encode_fields("code", json.dumps(code)))
    first_names: dict[int, str] = {}
    for name, tensor in _weights(model):
        first = first_names.setdefault(id(tensor), name)
        if first != name:
            digest.update(encode_fields(name, "the same as", first))
            continue
        digest.update(encode_fields(name, str(tensor.dtype), json.dumps(list(tensor.shape)), tensor.device.type))
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _weights(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, those included that are not saved, by each of their names; and what else is saved."""
    seen = set()
    for name, tensor in itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    ):
        seen.add(name)
        yield name, _readable(name, tensor)
    for name, value in sorted(model.state_dict().items()):
        if name not in seen:
            yield name, _readable(name, value)


def _readable(name: str, value: object) -> torch.Tensor:
    """A tensor whose bytes are the numbers that the model computes with.

    Raises:
        ValueError: it is something else.
    """
    if (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and not value.is_quantized
        and type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    ):
        return value
    kind = type(value).__name__
    raise ValueError(
        f"{name} is no plain tensor but a {kind}, whose bytes the digest of the weights cannot read, so that other "
        "weights might count as the same: load the model without this kind of quantization"
    )
