"""A real model of transformers whose prompts' KV a real daemon keeps: the same output, computed or found."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import LlamaForCausalLM
from transformers.cache_utils import DynamicCache

from kvcached_client.engines import one_process
from kvcached_client.offload_shard import OffloadShard
from kvcached_client.transformers import PromptCache, staging
from tests.project.daemon_process import running_daemon
from tests.project.source_tree import ROOT
from tests.transformers.models import llama, mistral, tokens

BLOCK_SIZE = 16
CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
CONFIG = ROOT / "configs/offload-cpu.toml"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One daemon for the tests that leave it alone; each has a model of its own."""
    directory = tmp_path_factory.mktemp("daemon") / "run"
    with running_daemon(CONFIG, directory):
        yield directory


def generated(model: Any, prompt: torch.Tensor, cache: DynamicCache | None = None) -> torch.Tensor:
    """Prompt and likeliest output."""
    output: torch.Tensor = model.generate(prompt, max_new_tokens=12, do_sample=False, **{CACHE_ARGUMENT: cache})
    return output


def asked(model: Any, prompts: PromptCache, prompt: torch.Tensor) -> int:
    """Have a prompt answered with the cache; how many tokens were found. The output is that of the model alone."""
    cache = prompts.load(prompt)
    found = int(cache.get_seq_length())
    output = generated(model, prompt, cache)
    assert torch.equal(output, generated(model, prompt))
    prompts.store(output, cache)
    return found


@pytest.mark.parametrize(
    "shape",
    [{}, {"dtype": torch.bfloat16}, {"head_dim": 24, "num_key_value_heads": 4, "num_hidden_layers": 3}],
    ids=["float32", "bfloat16", "other heads"],
)
def test_stored_kv_gives_the_same_output(run_dir: Path, shape: dict[str, Any]) -> None:
    """Found are all full blocks that prompts share, but for the last token; in a second process of the model, too."""
    model = llama(1, **shape)
    system = tokens(100)
    first, second = (torch.cat([system, tokens(7, seed)], dim=1) for seed in (2, 3))
    with PromptCache.connect(model, run_dir) as prompts:
        assert asked(model, prompts, first) == 0
        assert asked(model, prompts, second) == 96
        assert asked(model, prompts, first[:, :96]) == 80  # at least a token is left to compute
    again = llama(1, **shape)
    again.config.name_or_path = "somewhere else"
    with PromptCache.connect(again, run_dir) as prompts:
        assert asked(again, prompts, first) == 96


def test_next_turn_finds_what_was_generated(run_dir: Path) -> None:
    """The output is part of the next prompt: its full blocks are found, too."""
    model = llama(2)
    with PromptCache.connect(model, run_dir) as prompts:
        cache = prompts.load(tokens(30))
        output = generated(model, tokens(30), cache)
        assert prompts.store(output, cache) == 32
        assert asked(model, prompts, torch.cat([output, tokens(20, 5)], dim=1)) == 32


def test_other_weights_find_nothing(run_dir: Path) -> None:
    """One number among all weights makes another model."""
    model = llama(3)
    with PromptCache.connect(model, run_dir) as prompts:
        asked(model, prompts, tokens(40))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[5, 5] += 1e-3
    with PromptCache.connect(model, run_dir) as prompts:
        assert asked(model, prompts, tokens(40)) == 0


def test_long_prompts_go_through_a_small_buffer(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of many more blocks than the buffer has comes back whole."""
    model = llama(4)
    monkeypatch.setattr(staging, "STAGING_BYTES", 3 * BLOCK_SIZE * 256)
    with PromptCache.connect(model, run_dir) as prompts:
        assert prompts._staging.blocks == 3
        assert asked(model, prompts, tokens(1000)) == 0
        assert asked(model, prompts, tokens(1000)) == 992


def test_damaged_block_ends_what_is_found(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks before one that differs from what was stored are used, those behind it are computed."""
    model, load = llama(5), OffloadShard.load
    with PromptCache.connect(model, run_dir) as prompts:
        asked(model, prompts, tokens(200))
        monkeypatch.setattr(OffloadShard, "load", lambda shard, job: [*load(shard, job), 3, 7])
        assert asked(model, prompts, tokens(200)) == 3 * BLOCK_SIZE


def test_store_that_fails_here_is_called_off(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the engine's own side is raised; the blocks' slots are free again, and are stored by the next try."""
    model = llama(10)

    def fill(*_: object) -> None:
        raise MemoryError

    with PromptCache.connect(model, run_dir) as prompts:
        cache = prompts.load(tokens(40))
        output = generated(model, tokens(40), cache)
        with monkeypatch.context() as patched:
            patched.setattr(staging.Staging, "fill", fill)
            with pytest.raises(MemoryError):
                prompts.store(output, cache)
        assert prompts.store(output, cache) == 48
        assert asked(model, prompts, tokens(40)) == 32


def test_daemon_that_comes_goes_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a daemon everything is computed; one that comes is used, and nothing fails when it is killed."""
    model, run_dir = llama(6), tmp_path / "run"
    monkeypatch.setattr(one_process, "RETRY_S", 0.0)
    with PromptCache.connect(model, run_dir) as prompts:
        assert asked(model, prompts, tokens(40)) == 0
        with running_daemon(CONFIG, run_dir) as daemon:
            assert asked(model, prompts, tokens(40)) == 0
            assert asked(model, prompts, tokens(40)) == 32
            cache = prompts.load(tokens(40))
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()
            assert prompts.store(generated(model, tokens(40), cache), cache) == 0
            assert asked(model, prompts, tokens(40)) == 0
        with running_daemon(CONFIG, run_dir):
            asked(model, prompts, tokens(40))
            assert asked(model, prompts, tokens(40)) == 32


def test_daemon_that_hangs_costs_a_deadline(tmp_path: Path) -> None:
    """A daemon that does not answer is left alone for a while."""
    model, run_dir = llama(7), tmp_path / "run"
    with running_daemon(CONFIG, run_dir) as daemon, PromptCache.connect(model, run_dir, deadline_ms=200) as prompts:
        asked(model, prompts, tokens(40))
        daemon.send_signal(signal.SIGSTOP)
        try:
            assert asked(model, prompts, tokens(40)) == 0
            assert prompts._engine._session is None
        finally:
            daemon.send_signal(signal.SIGCONT)


def test_models_that_cannot_be_served_are_refused(run_dir: Path) -> None:
    """The reason names the layer, the mode or the input."""
    with pytest.raises(ValueError, match=r"layer 0 of MistralForCausalLM keeps a DynamicSlidingWindowLayer"):
        PromptCache.connect(mistral(), run_dir)
    with pytest.raises(ValueError, match=r"training mode"):
        PromptCache.connect(llama().train(), run_dir)
    rotary = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ValueError, match=r"of kind dynamic: its keys depend on the text behind them"):
        PromptCache.connect(llama(rope_parameters=rotary), run_dir)
    model = llama()
    model.peft_config = {"default": None}
    with pytest.raises(ValueError, match=r"merge_and_unload"):
        PromptCache.connect(model, run_dir)
    model = llama()
    model.config.vision_config = {"hidden_size": 8}
    with pytest.raises(ValueError, match=r"images or sound"):
        PromptCache.connect(model, run_dir)


def test_what_does_not_fit_together_is_refused(run_dir: Path) -> None:
    """Several sequences, a part of the sequence, and the cache of another model: nothing wrong is stored."""
    model, other = llama(8), llama(8, num_hidden_layers=3)
    with PromptCache.connect(model, run_dir) as prompts:
        with pytest.raises(ValueError, match="one sequence at a time"):
            prompts.load(tokens(40).repeat(2, 1))
        cache = DynamicCache(config=model.config)
        output = generated(model, tokens(40), cache)
        with pytest.raises(ValueError, match="give the whole sequence"):
            prompts.store(output[:, :40], cache)
        theirs = DynamicCache(config=other.config)
        generated(other, tokens(40), theirs)
        with pytest.raises(ValueError, match="another model"):
            prompts.store(output, theirs)
        assert prompts.load(tokens(40)).get_seq_length() == 0
        assert prompts.store(output, DynamicCache(config=model.config)) == 0
