"""The keyspace: what makes engines share blocks, and what keeps them apart."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_client.engines.weights import ModelFile, WeightReader
from kvcached_client.protocol.fields import NAME_LENGTH_MAX
from kvcached_client.vllm.identity import EngineDescription, Identity
from tests.vllm_connector.configs import cache_config, vllm_config


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a model's files."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text("{}")
    return folder


def described(config: Any, *, version: str = "0.32.0", snapshot: Path | None = None, **given: Any) -> EngineDescription:
    return EngineDescription(
        config,
        given.get("cache", cache_config()),
        vllm_version=version,
        weights_version=given.get("weights_version", ""),
        environment=given.get("environment", {}),
        find_snapshot=lambda *_: None if snapshot is None else str(snapshot),
        groups=given.get("groups"),
    )


def identity(config: Any, **given: Any) -> Identity:
    return described(config, **given).identify(WeightReader(None))


def of_model(model: Path, **changes: Any) -> bytes:
    return identity(vllm_config(model_config__model=str(model), **changes)).keyspace


def test_same_engine_same_keyspace(model: Path) -> None:
    """Two starts of one engine make the same 32 bytes."""
    assert of_model(model) == of_model(model)
    assert len(of_model(model)) == 32


@pytest.mark.parametrize(
    "changes",
    [
        {"model_config__code_revision": "abc"},
        {"model_config__dtype": "torch.bfloat16"},
        {"model_config__quantization": "awq"},
        {"model_config__quantization_config": {"bits": 4}},
        {"model_config__hf_config__config": {"hidden_size": 256}},
        {"model_config__hf_config__config": {"hidden_size": 128, "id2label": {0: "a", None: "b", "x": "c"}}},
        {"cache_config__cache_dtype": "fp8"},
        {"cache_config__kv_cache_dtype_skip_layers": ["0"]},
        {"cache_config__prefix_caching_hash_algo": "sha256_cbor"},
        {"device_config__device_type": "cuda"},
        {"model_config__multimodal_config": SimpleNamespace(mm_processor_kwargs={"do_normalize": False})},
        {"model_config__multimodal_config": SimpleNamespace(video_pruning_rate=0.5)},
        {"model_config__model_class_overrides": {"LlamaForCausalLM": "acme.models:Llama"}},
        {"load_config__load_format": "dummy"},
        {"parallel_config__pipeline_parallel_size": 2},
        {"load_config__model_loader_extra_config": {"qlora_adapter_name_or_path": "/adapters/a"}},
    ],
)
def test_what_changes_blocks_changes_the_keyspace(model: Path, changes: dict[str, Any]) -> None:
    """Engines that compute other bytes for the same tokens, or call the same tokens otherwise, share nothing."""
    assert of_model(model, **changes) != of_model(model)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_config__hf_config__config": {"hidden_size": 128, "_name_or_path": "x", "transformers_version": "9"}},
        {"model_config__seed": 5},
        {"model_config__revision": "abc"},
        {"model_config__max_model_len": 2048},
        {"model_config__multimodal_config": SimpleNamespace(mm_processor_kwargs={}, mm_processor_cache_gb=4)},
        {"model_config__multimodal_config": SimpleNamespace(video_pruning_rate=0.0, video_pruning_method="vidcom2")},
        {"parallel_config__tensor_parallel_size": 2},
    ],
)
def test_what_leaves_blocks_alone_keeps_the_keyspace(model: Path, changes: dict[str, Any]) -> None:
    """Who wrote the config, the seed of sampling, how long a context may be and how many ranks there are do not count.

    The root of the namespace has the number of ranks, and storage may hold blocks for any number.
    """
    assert of_model(model, **changes) == of_model(model)


def test_method_of_pruning_counts(model: Path) -> None:
    """Where tokens of videos are pruned, two methods leave other tokens at the same rate."""
    keyspaces = set()
    for method in ("evs", "vidcom2"):
        media = SimpleNamespace(video_pruning_rate=0.5, video_pruning_method=method)
        keyspaces.add(of_model(model, model_config__multimodal_config=media))
    assert len(keyspaces) == 2


def test_scales_of_the_encoder_of_pictures_count_by_their_content(model: Path, tmp_path: Path) -> None:
    """Two files of scales share blocks if they have the same bytes, whatever they are called."""
    keyspaces = []
    for name, text in (("one", '{"q": 1}'), ("equal", '{"q": 1}'), ("other", '{"q": 2}')):
        (tmp_path / name).write_text(text)
        media = SimpleNamespace(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(tmp_path / name))
        keyspaces.append(of_model(model, model_config__multimodal_config=media))
    dynamic = SimpleNamespace(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=None)
    assert keyspaces[0] == keyspaces[1]
    assert len({*keyspaces, of_model(model, model_config__multimodal_config=dynamic)}) == 3


@pytest.mark.parametrize(("dtype", "counts"), [("torch.bfloat16", True), ("torch.float32", False)])
def test_kernels_of_the_processor_count(
    model: Path, dtype: str, counts: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where vLLM's kernels for matrix tiles keep the bytes of a block in another order, engines share nothing."""
    keyspaces, told = set(), tmp_path / "cpuinfo"
    monkeypatch.setattr("kvcached_client.vllm.identity._CPU_INFO", told)
    for flags in ("fpu avx2 avx512f", "fpu avx2 avx512f amx_bf16 amx_tile"):
        told.write_text(f"flags : {flags}\n")
        keyspaces.add(of_model(model, model_config__dtype=dtype))
    assert len(keyspaces) == 1 + counts


def test_weights_count(model: Path) -> None:
    """Weight files with another name or other bytes make another keyspace; other files and other times do not."""
    keyspaces = [of_model(model)]
    (model / "README.md").write_text("words")
    os.utime(model / "model.safetensors", ns=(0, 5))
    assert of_model(model) == keyspaces[0]
    (model / "model.safetensors").write_bytes(b"wEights")
    keyspaces.append(of_model(model))
    (model / "model.safetensors").rename(model / "other.safetensors")
    keyspaces.append(of_model(model))
    assert len(set(keyspaces)) == 3


def test_two_downloads_share(model: Path, tmp_path: Path) -> None:
    """Engines that load equal files from different directories, by different names, share blocks."""
    copy = tmp_path / "elsewhere/llama"
    shutil.copytree(model, copy)
    assert of_model(copy) == of_model(model)
    named = identity(vllm_config(model_config__revision="main"), snapshot=copy)
    assert named.keyspace == of_model(model)
    assert named.warnings == ()


@pytest.mark.parametrize(
    "name", ["modeling_llama.py", "preprocessor_config.json", "hf_quant_config.json", "code/attention.py"]
)
def test_what_changes_the_computation_counts(model: Path, tmp_path: Path, name: str) -> None:
    """Two directories with the same weights, but with other code, quantization or treatment of images, do not share."""
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    for folder, text in ((model, "1"), (copy, "2")):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    assert of_model(copy) != of_model(model)


def test_code_from_elsewhere_is_known_by_the_models_name(model: Path, tmp_path: Path) -> None:
    """Code of a revision of its own is not read: two models with it share only if they have the same name."""
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    changes = {"model_config__code_revision": "main"}
    assert of_model(copy, **changes) != of_model(model, **changes)
    assert of_model(model, **changes) == of_model(model, **changes)


def test_files_that_changed_after_the_load(model: Path, tmp_path: Path) -> None:
    """If a file is replaced before it is read, the engine shares with nobody that loads the new file."""
    config = vllm_config(model_config__model=str(model))
    early = described(config)
    (model / "new").write_bytes(b"fine-tuned weights")
    (model / "new").replace(model / "model.safetensors")
    found = early.identify(WeightReader(None))
    assert "has changed since the model was loaded" in found.warnings[0]
    assert found.keyspace != identity(config).keyspace


def test_files_that_cannot_be_read(model: Path, tmp_path: Path) -> None:
    """If the files cannot be read, their place, sizes and times count, and the user is told."""

    class Unreadable(WeightReader):
        def digests(self, files: Sequence[ModelFile]) -> list[str]:
            raise OSError("input/output error")

    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    first, second = (
        described(vllm_config(model_config__model=str(folder))).identify(Unreadable(None)) for folder in (model, copy)
    )
    assert "input/output error" in first.warnings[0]
    assert first.keyspace != second.keyspace


def test_weights_of_one_file(model: Path) -> None:
    """A model may be one file."""
    file = model / "model.gguf"
    file.write_bytes(b"weights")
    first = of_model(file)
    file.write_bytes(b"more weights")
    assert of_model(file) != first


def test_weights_in_the_hub_cache(model: Path) -> None:
    """The files of a model that is named, not a folder, are found where it was downloaded to."""
    config = vllm_config()
    first = identity(config, snapshot=model)
    assert first.warnings == ()
    (model / "model.safetensors").write_bytes(b"other weights")
    assert identity(config, snapshot=model).keyspace != first.keyspace


def test_weights_that_are_not_found() -> None:
    """Where no weight files are found, the user is told to set `weights_version`, which counts."""
    config = vllm_config()
    found = identity(config)
    assert len(found.warnings) == 1
    assert "set weights_version" in found.warnings[0]
    assert identity(config, weights_version="2").keyspace != found.keyspace


def test_hash_root(model: Path) -> None:
    """PYTHONHASHSEED is the root of vLLM's hashes, so it counts."""
    config = vllm_config(model_config__model=str(model))
    assert (
        identity(config, environment={"PYTHONHASHSEED": "0"}).keyspace
        != identity(config, environment={"PYTHONHASHSEED": "1"}).keyspace
    )


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_random_hash_root_is_told(model: Path, algorithm: str) -> None:
    """Hashes with a random root are shared with nobody: the user is told, and makes no keyspace for every start."""
    config = vllm_config(model_config__model=str(model), cache_config__prefix_caching_hash_algo=algorithm)
    first, second = identity(config), identity(config)
    assert first.keyspace == second.keyspace
    assert "PYTHONHASHSEED" in first.warnings[0]
    assert identity(config, environment={"PYTHONHASHSEED": "0"}).warnings == ()


def test_the_layers_of_pipeline_stages_count(model: Path) -> None:
    """Where stages are of other layers, a part of a block is of other layers."""
    config = vllm_config(model_config__model=str(model), parallel_config__pipeline_parallel_size=2)
    uneven = identity(config, environment={"VLLM_PP_LAYER_PARTITION": "1,3"})
    assert uneven.keyspace != identity(config).keyspace
    assert uneven.label == "tiny float32 tp1 pp2"


def test_whose_code_computes_a_stage_counts(model: Path) -> None:
    """Tensors of stages have no names: vLLM's own code of a model and Transformers' may order a head otherwise."""
    keyspaces = {
        of_model(model, parallel_config__pipeline_parallel_size=2, model_config__architecture=f"{name}ForCausalLM")
        for name in ("Llama", "Transformers")
    }
    assert len(keyspaces) == 2


def test_minor_version_of_vllm_counts(model: Path) -> None:
    """Another minor version may lay out blocks otherwise; a patch does not."""
    config = vllm_config(model_config__model=str(model))
    keyspaces = {identity(config, version=version).keyspace for version in ("0.32.0", "0.32.1+cpu", "0.33.0")}
    assert len(keyspaces) == 2


def test_layout_counts(model: Path) -> None:
    """The name of vLLM's layout counts: it may order bytes otherwise in the same shapes."""
    config = vllm_config(model_config__model=str(model))
    other = cache_config()
    other.kv_cache_layout = "LBNHC"
    assert identity(config, cache=other).keyspace != identity(config).keyspace


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "longrope"}},
        {"rope_scaling": {"type": "dynamic"}},
        {"text_config": {"rope_scaling": {"rope_type": "yarn"}}},
        {"rope_parameters": {"full": {"rope_type": "yarn"}, "sliding": {"rope_type": "default"}}},
    ],
)
def test_longest_context_counts_where_positions_are_scaled(model: Path, rope: dict[str, Any]) -> None:
    """Where positions are scaled, the longest context may change how they are encoded."""
    keyspaces = {
        of_model(model, model_config__hf_config__config=rope, model_config__max_model_len=length)
        for length in (1024, 4096)
    }
    assert len(keyspaces) == 2


def test_plain_positions_do_not_count(model: Path) -> None:
    """Unscaled positions are the same for every context."""
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    keyspaces = {
        of_model(model, model_config__hf_config__config=rope, model_config__max_model_len=length)
        for length in (1024, 4096)
    }
    assert len(keyspaces) == 1


def test_random_weights_are_known_by_their_seed(model: Path) -> None:
    """Weights that are made from a seed are told apart by it."""
    made = {"load_config__load_format": "dummy"}
    assert of_model(model, **made) != of_model(model, model_config__seed=1, **made)


def test_draft_model_counts(model: Path) -> None:
    """The model that guesses tokens has layers of its own in the cache; a class of the user's may have some."""
    config = vllm_config(model_config__model=str(model))
    draft = vllm_config(model_config__model=str(model), model_config__dtype="torch.bfloat16").model_config
    keyspaces = {identity(config).keyspace}
    for method, guesser in (
        ("eagle", draft),
        ("eagle", config.model_config),
        ("mtp", config.model_config),
        ("draft_model", draft),
        ("custom_class", config.model_config),
    ):
        speculative = SimpleNamespace(method=method, draft_model_config=guesser)
        keyspaces.add(of_model(model, speculative_config=speculative))
    assert len(keyspaces) == 6


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix"])
def test_guesses_out_of_the_text_do_not_count(model: Path, method: str) -> None:
    """Guesses that no model makes change no block, though vLLM calls the model itself the one that drafts."""
    config = vllm_config(model_config__model=str(model))
    for guesser in (None, config.model_config):
        speculative = SimpleNamespace(method=method, draft_model_config=guesser)
        assert of_model(model, speculative_config=speculative) == identity(config).keyspace


def test_label(model: Path) -> None:
    """The namespace is called by the model, its type and the number of its shards, cut to what the daemon takes."""
    config = vllm_config(model_config__model=str(model), parallel_config__tensor_parallel_size=2)
    assert identity(config).label == "tiny float32 tp2"
    assert identity(vllm_config()).label == "acme/llama float32 tp1"
    assert len(identity(vllm_config(model_config__model="x" * 200)).label) == NAME_LENGTH_MAX


def test_groups_of_layers_count(model: Path) -> None:
    """Engines share blocks of several groups only if the groups are the same, in the same order."""
    config = vllm_config(model_config__model=str(model))
    full, windowed = ["full", 32, ["layer 1"]], ["window", 64, ["layer 0"]]
    made = [identity(config, groups=groups).keyspace for groups in (None, [full, windowed], [windowed, full], [full])]
    assert len(set(made)) == len(made)
    assert identity(config, groups=[full, windowed]).keyspace == made[1]
