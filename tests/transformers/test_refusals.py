"""Which models of transformers are refused, and that no model of text alone is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from transformers import CONFIG_MAPPING, BertConfig, BertLMHeadModel, GPT2Config, GPT2LMHeadModel
from transformers.models.auto import modeling_auto

from kvcached_client.transformers import PromptCache
from kvcached_client.transformers.refusals import check_model
from tests.transformers.models import llama

#: What takes something else than tokens in the mapping of models of text.
OF_IMAGES_OR_SOUND = {
    *("blt", "dots3_note", "emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "git", "got_ocr2"),
    *("llama4", "mllama", "moshi", "moss_transcribe_diarize", "phi4_multimodal"),
    *("qwen3_5", "qwen3_5_moe", "qwen4_exp"),
}
#: And what takes tokens alone in the mappings of others.
OF_TEXT = {"mistral4"}
#: Has no configuration by default.
WITHOUT_DEFAULT = "gemma4_assistant"
MAPPINGS = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ", "VISUAL_QUESTION_ANSWERING")


def models(mapping: str) -> Iterator[tuple[str, Any]]:
    """Stand-ins for the models of a mapping, without weights: their configuration, and what they are called with."""
    for name, found in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {}).items():
        if name == WITHOUT_DEFAULT:
            continue
        kind = getattr(transformers, found if isinstance(found, str) else found[0])
        model: Any = torch.nn.Module()
        model.config = CONFIG_MAPPING[name]()
        model.forward, model.main_input_name, model.device = kind.forward, kind.main_input_name, torch.device("cpu")
        yield name, model.eval()


def refusal(model: Any) -> str:
    """Why a model is refused; empty if it is not."""
    try:
        check_model(model)
    except ValueError as error:
        return str(error)
    return ""


def decoder(**options: Any) -> Any:
    sizes: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    model: Any = GPT2LMHeadModel(GPT2Config(**sizes, **options))
    return model.eval()


def bert(*, is_decoder: bool) -> Any:
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model: Any = BertLMHeadModel(BertConfig(**sizes, intermediate_size=32, is_decoder=is_decoder))
    return model.eval()


@pytest.mark.timeout(120)
def test_models_of_images_or_sound_are_refused() -> None:
    """Of each mapping of models that take something else than tokens, all are refused."""
    found = {name: refusal(model) for mapping in MAPPINGS for name, model in models(mapping)}
    assert {"chameleon", "fuyu", "granite_speech", "kyutai_speech_to_text", "llava", "vibevoice_asr"} <= set(found)
    assert {name for name, reason in found.items() if not reason} <= OF_TEXT


@pytest.mark.timeout(120)
def test_models_of_text_are_not_refused() -> None:
    """Of the mapping of models of text, those are refused that take other inputs or have an encoder."""
    found = {name: refusal(model) for name, model in models("CAUSAL_LM")}
    assert {"dbrx", "llama", "mpt", "gemma4_text", "gpt2"} <= set(found)
    refused = {name for name, reason in found.items() if reason and "has an encoder" not in reason}
    assert refused <= OF_IMAGES_OR_SOUND


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: decoder(add_cross_attention=True), "output of an encoder, in transformer.h.0.crossattention"),
        (lambda: bert(is_decoder=False), "attends in both directions, in bert.encoder"),
    ],
    ids=["cross-attention", "both directions"],
)
def test_keys_that_depend_on_more_than_tokens_before_them_are_refused(model: Any, reason: str) -> None:
    """The reason names the module that attends to something else."""
    assert reason in refusal(model())


def test_decoders_of_these_kinds_are_accepted() -> None:
    """Without cross-attention, and where attention looks back only, such models are served."""
    assert [refusal(decoder()), refusal(bert(is_decoder=True))] == ["", ""]


def test_encoder_is_refused() -> None:
    """A configuration of encoder and decoder is reason enough."""
    model = llama()
    model.config.is_encoder_decoder = True
    assert "has an encoder" in refusal(model)


def test_weights_that_are_elsewhere_are_refused() -> None:
    """Weights on the device `meta`, as accelerate leaves them when it offloads, cannot be read."""
    model = llama()
    model.model.layers[1].to("meta")
    assert "has weights that are elsewhere, as model.layers.1." in refusal(model)


def test_model_without_kv_is_refused(tmp_path: Path) -> None:
    """A model that puts nothing into its cache has nothing to store."""
    sizes: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    model: Any = transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(**sizes))
    with pytest.raises(ValueError, match="leaves a cache empty"):
        PromptCache.connect(model.eval(), tmp_path)


@pytest.mark.parametrize("block_size", [0, -16, 65_537])
def test_blocks_have_tokens(tmp_path: Path, block_size: int) -> None:
    """The size of a block is refused before the model computes anything."""
    with pytest.raises(ValueError, match=f"block_size {block_size}"):
        PromptCache.connect(llama(), tmp_path, block_size=block_size)
