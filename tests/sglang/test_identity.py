"""Which SGLang processes share pages, by what they have loaded, with as much of SGLang as its storage sees."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_client.sglang.computation import computed_with
from tests.sglang.conftest import Make
from tests.sglang.fake_sglang import FakeSglang, MHATokenToKVPoolHost, behind, hashes, places

KEYS = hashes(2)


def found(make: Make, **config: Any) -> int:
    """How many of two pages an SGLang finds; it stores what it has not found."""
    storage = make(MHATokenToKVPoolHost(), **config)
    pages = int(storage.batch_exists(KEYS))
    assert storage.batch_set_v1(KEYS, places(0, 1), behind()) == [True, True]
    return pages


def of_version(make: Make, run_dir: Path, version: str) -> int:
    """As `found`, with a version of the weights."""
    table = {"run_dir": str(run_dir), "weights_version": version}
    return found(make, extra_config={"interface_v1": 1, "kvcached": table})


@pytest.mark.parametrize(
    ("bag", "changes"),
    [
        ("moe", {"kt_num_gpu_experts": 4}),
        ("moe", {"kt_max_deferred_experts_per_token": 1}),
        ("moe", {"kt_method": "AMXINT4"}),
        ("mamba", {"mamba_ssm_dtype": "bfloat16"}),
    ],
)
def test_how_experts_and_states_are_computed_makes_another_model(
    make: Make, fake: FakeSglang, bag: str, changes: dict[str, Any]
) -> None:
    """Experts in another precision, or in other places of the sum, give other keys and values; so do states."""
    assert found(make) == 0
    vars(getattr(fake.bags["exec"], bag)).update(changes)
    assert found(make) == 0
    assert found(make) == 2


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("kernel", "attention_backend", "torch_native"),
        ("kernel", "prefill_attention_backend", "torch_flex"),
        ("kernel", "decode_attention_backend", "torch_flex"),
        ("kernel", "enable_precise_embedding_interpolation", True),
        ("deterministic", "enable_deterministic_inference", True),
        ("deterministic", "rl_on_policy_target", "fsdp"),
        ("comm", "enable_quant_communications", True),
        ("kernel", "fp4_gemm_runner_backend", "marlin"),
        ("kernel", "fp8_gemm_runner_backend", "deep_gemm"),
        ("kernel", "triton_attention_reduce_in_fp32", True),
        ("features", "enable_tf32_matmul", True),
    ],
)
def test_how_attention_and_sums_are_computed_makes_another_model(
    make: Make, fake: FakeSglang, group: str, name: str, value: object
) -> None:
    """Another attention backend may leave out a cap or sinks of the model, and sums may be rounded to eight bits."""
    assert found(make) == 0
    vars(fake.bags["exec"]).setdefault(group, SimpleNamespace())
    setattr(getattr(fake.bags["exec"], group), name, value)
    assert found(make) == 0
    assert found(make) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mm_process_config", {"image": {"max_pixels": 100_000}}),
        ("image_processor_backend", "pil"),
        ("disable_fast_image_processor", True),
        ("mm_attention_backend", "sdpa"),
    ],
)
def test_what_the_model_sees_of_a_picture_makes_another_model(
    make: Make, fake: FakeSglang, name: str, value: object
) -> None:
    """A request may name a picture, whose pages then depend on how it is prepared; not on the threads that load it."""
    assert found(make) == 0
    fake.bags["mm"].mm_io_worker_num = 4
    assert found(make) == 2
    setattr(fake.bags["mm"], name, value)
    assert found(make) == 0
    assert found(make) == 2


def test_only_backends_that_attend_count(make: Make, fake: FakeSglang) -> None:
    """A backend named for prefill and for decode is the same as one named for both, and sampling changes no page."""
    kernel = fake.bags["exec"].kernel
    assert found(make) == 0
    kernel.prefill_attention_backend = kernel.decode_attention_backend = kernel.attention_backend
    kernel.attention_backend, kernel.sampling_backend = None, "pytorch"
    assert found(make) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SGLANG_FP8_IGNORED_LAYERS", "model.layers.0"),
        ("SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR", "1000"),
        ("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "16384"),
        ("SGLANG_MINIMAX_M3_INDEX_TOPK_FREQ", "4"),
        ("SGLANG_OPT_MINIMAX_M3_FP8_INDEX_CACHE", "0"),
        ("SGLANG_DISABLE_M3_FP8_ATTN_GEMM", "1"),
        ("SGLANG_DISABLE_MSA_V1_Q8KV4", "1"),
        ("SGLANG_FORCE_FP8_MARLIN", "1"),
        ("SGLANG_OPT_HOPPER_BLOCK_FP8_BF16", "0"),
        ("SGLANG_IMAGE_MAX_PIXELS", "100000"),
        ("SGLANG_RESIZE_RESAMPLE", "BICUBIC"),
        ("VIDEO_MAX_PIXELS", "100000"),
    ],
)
def test_variables_that_decide_on_pages_make_another_model(
    make: Make, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """SGLang reads from its environment which layers it quantizes and what attention leaves out; others are ignored."""
    assert found(make) == 0
    monkeypatch.setenv(name, "")
    monkeypatch.setenv("SGLANG_LOG_MS", "1")
    assert found(make) == 2
    monkeypatch.setenv(name, value)
    assert found(make) == 0


def test_settings_that_are_not_set_keep_the_keyspace() -> None:
    """What says nothing is not in the description, so that versions of SGLang with more settings find their pages."""
    kernel = SimpleNamespace(attention_backend=None, prefill_kv_cache_dequant_dtype="auto", dsa_prefill_backend=None)
    media = SimpleNamespace(mm_process_config={}, image_processor_backend="auto", disable_fast_image_processor=False)
    environment = {"SGLANG_FP8_IGNORED_LAYERS": "", "PATH": "/bin"}
    assert computed_with(SimpleNamespace(kernel=kernel), media, environment) == {}


@pytest.mark.parametrize("url", ["s3://bucket/models/llama", "redis://127.0.0.1:6379/llama"])
def test_models_at_urls_need_a_version(make: Make, fake: FakeSglang, run_dir: Path, url: str) -> None:
    """Hugging Face refuses a URL as the name of a model; there are no files of it here, so that a version tells."""
    fake.bags["model"].model_path = url
    with pytest.raises(ValueError, match=r"no weight files of .* give a \"weights_version\""):
        found(make)
    assert [of_version(make, run_dir, version) for version in ("1", "1", "2")] == [0, 2, 0]


@pytest.mark.parametrize(
    "option", ["--forward-hooks", "SGLANG_EXTERNAL_MODEL_PACKAGE", "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE"]
)
def test_code_that_is_in_no_file_needs_a_version(
    make: Make, fake: FakeSglang, run_dir: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """Hooks that bend what modules put out, and models of other packages, are told apart from none, and by version."""
    assert of_version(make, run_dir, "1") == 0
    if option == "--forward-hooks":
        fake.bags["observability"].forward_hooks = [{"target_modules": ["model.layers.0.mlp"], "hook_factory": "a:b"}]
    else:
        monkeypatch.setenv(option, "models_of_mine")
    with pytest.raises(ValueError, match=rf"with {option}, code .* give a \"weights_version\""):
        found(make)
    assert [of_version(make, run_dir, version) for version in ("1", "1", "2")] == [0, 2, 0]


def test_weights_count_beside_forward_hooks(make: Make, fake: FakeSglang, run_dir: Path) -> None:
    """A version of the hooks' code does not stand for the weight files."""
    fake.bags["observability"].forward_hooks = [{"hook_factory": "a:b"}]
    assert of_version(make, run_dir, "1") == 0
    (Path(fake.bags["model"].model_path) / "model.safetensors").write_bytes(b"others")
    assert of_version(make, run_dir, "1") == 0


def test_threads_of_experts_are_not_in_the_keyspace(make: Make, fake: FakeSglang) -> None:
    """How many threads compute experts changes no page."""
    assert found(make) == 0
    fake.bags["exec"].moe.kt_cpuinfer = 8
    assert found(make) == 2


def test_versions_without_such_settings_are_served(make: Make, fake: FakeSglang) -> None:
    """Not every SGLang says how experts and states are computed."""
    fake.bags["exec"] = SimpleNamespace()
    assert [found(make), found(make)] == [0, 2]


@pytest.mark.parametrize(
    ("bag", "name", "file"),
    [
        ("model", "quantization_param_path", "scales.json"),
        ("moe", "kt_weight_path", "experts/experts.safetensors"),
    ],
)
def test_content_of_further_files_counts(
    make: Make, fake: FakeSglang, tmp_path: Path, bag: str, name: str, file: str
) -> None:
    """Scales of keys and values, and weights of experts, are told apart by what is in their files, not by path."""
    settings = fake.bags["model"] if bag == "model" else fake.bags["exec"].moe
    places_of_file = tmp_path / "first", tmp_path / "second"
    for place in places_of_file:
        path = place / file
        path.parent.mkdir(parents=True)
        path.write_bytes(b"1")
    first, second = (place / Path(file).parts[0] for place in places_of_file)
    setattr(settings, name, str(first))
    assert found(make) == 0
    setattr(settings, name, str(second))
    assert found(make) == 2
    (places_of_file[1] / file).write_bytes(b"2")
    assert found(make) == 0


def test_further_files_that_are_not_here_need_a_version(make: Make, fake: FakeSglang, run_dir: Path) -> None:
    """Nobody knows what is in them, unless a version tells."""
    fake.bags["exec"].moe.kt_weight_path = "/nowhere"
    with pytest.raises(ValueError, match=r"no files of /nowhere \(kt_weight_path\)"):
        found(make)
    assert [of_version(make, run_dir, version) for version in ("1", "1", "2")] == [0, 2, 0]


def lora(name: str, path: Path | str) -> SimpleNamespace:
    """As SGLang names an adapter."""
    return SimpleNamespace(lora_name=name, lora_path=str(path))


def test_content_of_adapters_counts(make: Make, fake: FakeSglang, tmp_path: Path) -> None:
    """SGLang's hashes name an adapter by name and path: what is in its files tells whether it is the same."""
    (weights_file := tmp_path / "adapter_model.safetensors").write_bytes(b"1")
    (configuration := tmp_path / "adapter_config.json").write_text('{"lora_alpha": 16}')
    fake.bags["lora"].lora_paths = [lora("sql", tmp_path)]
    assert [found(make), found(make)] == [0, 2]
    configuration.write_text('{"lora_alpha": 32}')
    assert found(make) == 0
    weights_file.write_bytes(b"2")
    assert found(make) == 0
    fake.bags["lora"].lora_paths = [lora("code", tmp_path)]
    assert found(make) == 0


def test_adapters_that_are_not_loaded_do_not_count(make: Make, fake: FakeSglang) -> None:
    """If adapters are switched off, SGLang leaves their paths as they are written, and loads none."""
    assert found(make) == 0
    fake.bags["lora"].enable_lora, fake.bags["lora"].lora_paths = False, ["sql=/nowhere"]
    assert found(make) == 2


def test_adapters_that_are_not_here_need_a_version(make: Make, fake: FakeSglang, run_dir: Path) -> None:
    """Nobody knows what is in them, unless a version tells."""
    fake.bags["lora"].lora_paths = [lora("sql", "/nowhere")]
    with pytest.raises(ValueError, match=r"no files of /nowhere \(lora_paths\)"):
        found(make)
    assert [of_version(make, run_dir, version) for version in ("1", "1", "2")] == [0, 2, 0]


@pytest.mark.parametrize("name", ["a/b/c", "/nowhere", "-model"])
def test_names_that_the_hub_refuses_need_a_version(make: Make, fake: FakeSglang, run_dir: Path, name: str) -> None:
    """What can be no name of the hub is a model that is not here, and no failure of its own."""
    fake.bags["model"].model_path = name
    with pytest.raises(ValueError, match=r"no weight files of .* give a \"weights_version\""):
        found(make)
    assert of_version(make, run_dir, "1") == 0


def test_every_version_of_sglang_has_its_own_pages(make: Make, fake: FakeSglang) -> None:
    """The next version may compute otherwise with the same settings."""
    assert [found(make), found(make)] == [0, 2]
    fake.version = "0.5.24"
    assert found(make) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("load_format", "remote_instance"),
        ("load_format", "expert_pack"),
        ("load_format", "presharded"),
        ("load_format", "npcache"),
        ("weight_cache_mode", "client"),
    ],
)
def test_weights_from_elsewhere_need_a_version(
    make: Make, fake: FakeSglang, run_dir: Path, name: str, value: str
) -> None:
    """Weights of another process, or of an earlier copy, are not those of the model's files, though there are some."""
    setattr(fake.bags["model"], name, value)
    with pytest.raises(ValueError, match=r"the weights of .* are .* give a \"weights_version\""):
        found(make)
    assert [of_version(make, run_dir, version) for version in ("1", "1", "2")] == [0, 2, 0]


def test_configuration_may_have_keys_of_several_types(make: Make, fake: FakeSglang) -> None:
    """Python's dictionaries take what JSON cannot order: such a model is served, and known by its values."""
    labels: dict[Any, str] = {0: "a", 10: "b", "x": "c", None: "d", (1, 2): "e"}
    fake.config["id2label"] = labels
    assert found(make) == 0
    fake.config["id2label"] = dict(reversed(labels.items()))
    assert found(make) == 2
    for key in (0, None):
        fake.config["id2label"] = {**labels, key: "other"}
        assert found(make) == 0
