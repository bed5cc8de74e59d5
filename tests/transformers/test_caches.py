"""Which caches and prompts are stored, and that the buffer that they go through keeps nothing of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, QuantizedLayer, StaticCache

from kvcached_client.transformers import PromptCache, staging
from kvcached_client.transformers.model import tensors_of
from tests.project.daemon_process import running_daemon
from tests.transformers.models import llama, tokens
from tests.transformers.test_prompt_cache import BLOCK_SIZE, CACHE_ARGUMENT, CONFIG, asked, generated

#: Of a token in the cache of `llama()`, all layers.
TOKEN_BYTES = 256


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One daemon; each test has a model of its own."""
    directory = tmp_path_factory.mktemp("daemon") / "run"
    with running_daemon(CONFIG, directory):
        yield directory


class Quantized(QuantizedLayer):  # type: ignore[no-untyped-call]
    """Moves tokens out of `keys` and `values` as they become many, and loses nothing."""

    def _quantize(self, tensor: Any, axis: Any = 0) -> Any:
        return tensor

    def _dequantize(self, q_tensor: Any) -> Any:
        return q_tensor


class NewestFirst(DynamicLayer):  # type: ignore[no-untyped-call]
    """Holds as many tokens as are computed, in another order."""

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> Any:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tensors: Any = (key_states, self.keys), (value_states, self.values)
        self.keys, self.values = (torch.cat(parts, dim=-2) for parts in tensors)
        return self.keys, self.values


def test_cache_that_holds_tokens_elsewhere_is_refused(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantized layers hold the last tokens only, which are not stored as the first ones."""
    model, prompt = llama(20), tokens(40)
    monkeypatch.setattr(staging, "STAGING_BYTES", 3 * BLOCK_SIZE * TOKEN_BYTES)
    with PromptCache.connect(model, run_dir) as prompts:
        cache: Any = Cache(layers=[Quantized(residual_length=128) for _ in range(2)])
        output = model.generate(prompt, max_new_tokens=100, do_sample=False, **{CACHE_ARGUMENT: cache})
        with pytest.raises(ValueError, match="not of all tokens as they were computed"):
            prompts.store(output, cache)
        assert prompts.load(prompt).get_seq_length() == 0


def test_cache_with_layers_of_another_class_is_refused(run_dir: Path) -> None:
    """Which token is where in its tensors, only the class of a layer knows."""
    model, prompt = llama(19), tokens(40)
    with PromptCache.connect(model, run_dir) as prompts:
        layer: Any = NewestFirst
        cache: Any = Cache(layers=[layer() for _ in range(2)])
        output = generated(model, prompt, cache)
        with pytest.raises(ValueError, match="not of all tokens as they were computed"):
            prompts.store(output, cache)


def test_cache_whose_layers_hold_fewer_tokens_is_refused(run_dir: Path) -> None:
    """Each layer must hold as many keys and values as the first one."""
    model, prompt = llama(21), tokens(40)
    with PromptCache.connect(model, run_dir) as prompts:
        cache = DynamicCache(config=model.config)
        output = generated(model, prompt, cache)
        last: Any = cache.layers[1]
        last.values = last.values[:, :, 1:]
        with pytest.raises(ValueError, match="not of all tokens as they were computed"):
            prompts.store(output, cache)


def test_static_cache_is_stored(run_dir: Path) -> None:
    """Its layers hold all tokens from the first on, with room behind them."""
    model, prompt = llama(22), tokens(40)
    with PromptCache.connect(model, run_dir) as prompts:
        cache: Any = StaticCache(config=model.config, max_cache_len=64)
        with torch.no_grad():
            model(prompt, **{CACHE_ARGUMENT: cache})
        assert prompts.store(prompt, cache) == 32
        assert asked(model, prompts, prompt) == 32


def test_buffer_of_two_blocks_is_not_taken_for_keys_and_values(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two blocks fit into the buffer, it has three."""
    model = llama(23)
    monkeypatch.setattr(staging, "STAGING_BYTES", 2 * BLOCK_SIZE * TOKEN_BYTES)
    with PromptCache.connect(model, run_dir) as prompts:
        assert prompts._staging.blocks == 3
        asked(model, prompts, tokens(100))
        assert asked(model, prompts, tokens(100)) == 96


def test_buffer_keeps_no_gradients(run_dir: Path) -> None:
    """What a model computes with gradients is stored without them: they end with the cache."""
    model, prompt = llama(24), tokens(40)
    with PromptCache.connect(model, run_dir) as prompts:
        cache = prompts.load(prompt)
        model(prompt, **{CACHE_ARGUMENT: cache})
        assert prompts.store(prompt, cache) == 32
        assert not any(room.requires_grad for room in prompts._staging._room)
        assert not any(each.requires_grad for each in tensors_of(prompts.load(prompt)))


def test_buffer_and_caches_outlast_inference_mode(run_dir: Path) -> None:
    """Made and loaded in inference mode, they may be used outside of it."""
    model, prompt = llama(25), tokens(60)
    with torch.inference_mode():
        prompts = PromptCache.connect(model, run_dir)
    with prompts:
        assert asked(model, prompts, prompt) == 0
        with torch.inference_mode():
            cache = prompts.load(prompt)
        assert cache.get_seq_length() == 48
        assert not any(each.is_inference() for each in tensors_of(cache))


def test_buffer_is_on_the_cpu(run_dir: Path) -> None:
    """Another default device does not move it."""
    model = llama(26)
    with torch.device("meta"):
        prompts = PromptCache.connect(model, run_dir)
    with prompts:
        asked(model, prompts, tokens(40))
        assert asked(model, prompts, tokens(40)) == 32


def test_prompt_with_padding_is_neither_stored_nor_found(run_dir: Path) -> None:
    """`generate` hides tokens that are padding from the others, if padding does not end a text: their KV differs."""
    model, prompt = llama(27), tokens(40)
    prompt[0, 20] = 5
    with PromptCache.connect(model, run_dir) as prompts:
        model.generation_config.pad_token_id = 5
        assert [asked(model, prompts, prompt) for _ in range(2)] == [0, 0]
        assert prompts.store(prompt, computed(model, prompt)) == 0
        model.generation_config.pad_token_id = None
        assert [asked(model, prompts, prompt) for _ in range(2)] == [0, 32]
        model.generation_config.pad_token_id = 5
        assert asked(model, prompts, prompt) == 0
        model.generation_config.eos_token_id = [2, 5]
        assert prompts.load(prompt).get_seq_length() == 32


def computed(model: Any, prompt: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt, **{CACHE_ARGUMENT: cache})
    return cache


def test_autocast_is_refused(run_dir: Path) -> None:
    """What torch.autocast rounds is neither stored nor found, and no model is connected."""
    model, prompt = llama(28), tokens(40)
    with PromptCache.connect(model, run_dir) as prompts:
        cache = computed(model, prompt)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with pytest.raises(ValueError, match=r"torch.autocast is on for cpu"):
                prompts.load(prompt)
            with pytest.raises(ValueError, match=r"torch.autocast is on for cpu"):
                prompts.store(prompt, cache)
            with pytest.raises(ValueError, match=r"torch.autocast is on for cpu"):
                PromptCache.connect(model, run_dir)
        assert prompts.store(prompt, cache) == 32


def test_closed_prompt_cache_is_not_opened_again(run_dir: Path) -> None:
    """It says so; no session is opened."""
    model, prompt = llama(29), tokens(40)
    with PromptCache.connect(model, run_dir) as prompts:
        cache = computed(model, prompt)
    with pytest.raises(ValueError, match="is closed: connect another one"):
        prompts.load(prompt)
    with pytest.raises(ValueError, match="is closed: connect another one"):
        prompts.store(prompt, cache)
    assert prompts._engine._session is None


def test_assisted_generation_is_refused(run_dir: Path) -> None:
    """With a cache of `load`, found or not, it computes nothing: transformers would compute the prompt twice."""
    model, prompt = llama(30), tokens(40)
    options: list[dict[str, Any]] = [{"prompt_lookup_num_tokens": 3}, {"assistant_model": llama(31)}]
    with PromptCache.connect(model, run_dir) as prompts:
        for found in (0, 32):
            for option in options:
                cache = prompts.load(prompt)
                assert cache.get_seq_length() == found
                with pytest.raises(ValueError, match=r"assisted generation .* leave these options out"):
                    model.generate(prompt, max_new_tokens=4, do_sample=False, **option, **{CACHE_ARGUMENT: cache})
                assert cache.get_seq_length() == found
            assert prompts.store(prompt, computed(model, prompt)) == 32


def test_ordinary_generation_does_not_look_like_assisted_one(run_dir: Path) -> None:
    """On some devices it would record the past of a cache that can be cropped."""
    model = llama(32)
    with PromptCache.connect(model, run_dir) as prompts:
        assert not prompts.load(tokens(40)).is_croppable


def test_wrong_arguments_are_named(run_dir: Path) -> None:
    """What was given in place of tokens, of a cache, of a size or of a time, and what to give."""
    model, prompt = llama(33), tokens(40)
    with PromptCache.connect(model, run_dir) as prompts:
        cache, wrong = prompts.load(prompt), cast("Any", [1, 2, 3])
        options = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True, CACHE_ARGUMENT: cache}
        with pytest.raises(ValueError, match=r"tokens in a Generate\w*Output: give its \.sequences"):
            prompts.store(model.generate(prompt, **options), cache)
        for kind in (torch.float32, torch.complex64, torch.bool):
            with pytest.raises(ValueError, match=f"tokens of {kind}: give whole numbers"):
                prompts.load(torch.ones((1, 20), dtype=kind))
        with pytest.raises(ValueError, match=r"tokens in a list: give a tensor of shape \[1, tokens\]"):
            prompts.load(wrong)
        with pytest.raises(ValueError, match=r"the cache is a list: give that which generate was given"):
            prompts.store(prompt, wrong)
    for what in ("gpt2", torch.nn.Linear(2, 2)):
        with pytest.raises(ValueError, match=rf"a {type(what).__name__} in place of a model: load one of transformers"):
            PromptCache.connect(what, run_dir)
    with pytest.raises(ValueError, match="block_size True"):
        PromptCache.connect(model, run_dir, block_size=True)
    with pytest.raises(ValueError, match=r"deadline_ms is 1\.5, a whole number is needed"):
        PromptCache.connect(model, run_dir, deadline_ms=cast("int", 1.5))
