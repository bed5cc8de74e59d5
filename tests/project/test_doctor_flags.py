"""vLLM's arguments, as `kvcached doctor` reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcached.doctor.checks import _agreement
from kvcached.doctor.vllm_flags import (
    HYBRID_CONNECTOR,
    TRANSFER_CONFIG,
    VllmFlags,
    check_flags,
    check_model,
    parse,
)
from kvcached.doctor.vllm_layout import check_layout
from kvcached_client.doctor.checks import HASH_BLOCK_SIZE, HASHED_TOKENS, Finding
from kvcached_client.protocol.engine import OffloadInfo
from kvcached_client.types import Verify
from kvcached_client.vllm.keys import VllmHashing, block_hashes

RUN_DIR = Path("/run/kvcached")
CONFIG = json.dumps(TRANSFER_CONFIG)
#: More brackets than a reader of JSON goes into.
DEEP = "[" * 100_000
GOOD = ["serve", "/models/tiny", "--kv-transfer-config", CONFIG, "--prefix-caching-hash-algo", "sha256_cbor"]
OFFERED = OffloadInfo(slabs=4, slab_bytes=1 << 20, namespaces_max=2, verify=Verify.ALWAYS)
MODEL = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}


def problems(arguments: list[str], environment: dict[str, str] | None = None) -> list[Finding]:
    """What is found, apart from what is ok."""
    found = list(check_flags(parse(arguments), environment or {}, RUN_DIR))
    assert any(finding.level == "ok" for finding in found) != any(finding.level == "fail" for finding in found)
    return [finding for finding in found if finding.level != "ok"]


def changed(**fields: object) -> list[str]:
    """The good arguments with other values in the transfer configuration; None takes one out."""
    config = {name: value for name, value in {**TRANSFER_CONFIG, **fields}.items() if value is not None}
    return ["--kv-transfer-config", json.dumps(config), "--prefix-caching-hash-algo=sha256_cbor"]


def test_priorities_without_a_cache_of_vllms_own_are_as_good() -> None:
    """Only with that cache does vLLM find blocks that it has not computed."""
    assert problems([*GOOD, "--scheduling-policy", "priority", "--no-enable-prefix-caching"]) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["-n", "2", "-dp", "2"],
        ["--nnodes", "2", "--data-parallel-size", "16", "--data-parallel-size-local", "8"],
        ["-n", "2", "-dp", "4", "--data-parallel-external-lb"],
        ["-n", "2", "-dp", "2", "-dpl", "0"],
        ["--nnodes=1"],
        ["--nnodes", "two"],
    ],
)
def test_data_parallelism_over_several_nodes_is_as_good(arguments: list[str]) -> None:
    """Each rank of data parallelism is an engine of its own: several nodes are no fault where each has one."""
    assert problems([*GOOD, *arguments]) == []


def test_engine_that_only_loads_is_as_good() -> None:
    """The role `kv_consumer` is no fault."""
    assert problems(changed(kv_role="kv_consumer")) == []


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        (["serve", "m", "--port", "8000"], VllmFlags({"port": "8000"}, ["serve", "m"])),
        (["--enforce-eager", "--block-size=64"], VllmFlags({"enforce-eager": "", "block-size": "64"}, [])),
        (
            ["--kv_transfer_config", "{}", "-tp", "2"],
            VllmFlags({"kv-transfer-config": "{}", "tensor-parallel-size": "2"}),
        ),
        (
            ["-q", "awq", "m", "-n=2", "-sc.draft_tensor_parallel_size", "1"],
            VllmFlags(
                {"quantization": "awq", "nnodes": "2", "speculative-config.draft_tensor_parallel_size": "1"}, ["m"]
            ),
        ),
        (["--kv_transfer_config.kv_role=kv_both"], VllmFlags({"kv-transfer-config.kv_role": "kv_both"})),
    ],
)
def test_arguments_are_read_as_vllm_reads_them(arguments: list[str], flags: VllmFlags) -> None:
    """Values come behind a space or =, names with dashes or underscores, and fields of JSON behind a dot."""
    assert parse(arguments) == flags


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        (["serve", "m"], "m"),
        (["m"], "m"),
        (["--model", "m"], "m"),
        (["serve", "--model=m"], "m"),
        (["serve"], ""),
        ([], ""),
    ],
)
def test_model_is_named_in_several_ways(arguments: list[str], model: str) -> None:
    """As `vllm serve MODEL`, and as `--model` of the server's module."""
    assert parse(arguments).model == model


def test_good_arguments_have_no_problem() -> None:
    """The documented command line passes, also with its fields behind dots."""
    assert problems(GOOD) == []
    dotted = [part for name, value in TRANSFER_CONFIG.items() for part in (f"--kv-transfer-config.{name}", value)]
    assert problems([*dotted, "--prefix-caching-hash-algo", "sha256_cbor"]) == []


@pytest.mark.parametrize(
    ("arguments", "said", "fix"),
    [
        (["serve", "m", "--prefix-caching-hash-algo=sha256_cbor"], "is missing", CONFIG),
        (["--kv-transfer-config", "{broken", "--prefix-caching-hash-algo=sha256_cbor"], "no JSON object", CONFIG),
        (["--kv-transfer-config", DEEP, "--prefix-caching-hash-algo=sha256_cbor"], "no JSON object", CONFIG),
        (["--kv-transfer-config", "[1]", "--prefix-caching-hash-algo=sha256_cbor"], "no JSON object", CONFIG),
        (changed(kv_role="kv_producer"), "kv_role is 'kv_producer'", '"kv_role": "kv_both"'),
        (changed(kv_load_failure_policy=None), "kv_load_failure_policy is missing", '"recompute"'),
        (changed(kv_connector_module_path="x"), "kv_connector_module_path is 'x'", "kvcached_client.vllm"),
        (
            changed(kv_connector_extra_config={"weight_version": "1"}),
            "weight_version unknown",
            "kv_connector_extra_config",
        ),
        (changed(kv_connector_extra_config=3), "not iterable", "kv_connector_extra_config"),
        (changed(kv_connector_extra_config={"run_dir": "/run/other"}), "/run/other", "the same run_dir"),
        ([*GOOD, "--block-size", "16"], "multiples of 32", "--block-size 32"),
        ([*GOOD, "--scheduling-policy", "priority"], "has not computed", "--no-enable-prefix-caching"),
        ([*GOOD, "--enable-fault-tolerance"], "goes on after a step that failed", "leave out"),
        ([*GOOD, "--nnodes", "2"], "--nnodes 2: an engine's workers on 2 nodes", "leave out --nnodes"),
        ([*GOOD, "-n", "2"], "--nnodes 2: an engine's workers on 2 nodes", "leave out --nnodes"),
        ([*GOOD, "-n", "4", "-dp", "2"], "--nnodes 4: an engine's workers on 2 nodes", "--data-parallel-size"),
        ([*GOOD, "-n", "2", "-dp", "2", "-dpl", "2"], "workers on 2 nodes", "leave out --nnodes"),
        ([*GOOD, "-dcp", "2"], "--decode-context-parallel-size 2 is not supported", "leave out"),
        ([*GOOD, "-pcp=2"], "--prefill-context-parallel-size 2 is not supported", "leave out"),
        ([*GOOD, "--pooler-config", '{"seq_pooling_type": "MEAN"}'], "seq_pooling_type MEAN takes all", "LAST"),
        ([*GOOD, "--pooler-config.tok_pooling_type", "STEP"], "tok_pooling_type STEP takes all", "LAST"),
        ([*GOOD[:-1], "xxhash_cbor"], "begin with a random number", "sha256_cbor"),
    ],
)
def test_what_would_not_work_fails_with_a_fix(arguments: list[str], said: str, fix: str) -> None:
    """Each mistake is one failure that names it and says what to write instead."""
    (finding,) = problems(arguments)

    assert (finding.level, said in finding.text, fix in finding.fix) == ("fail", True, True), finding


def behind_dots(**fields: str) -> list[str]:
    """The good arguments with fields behind dots; two underscores are a dot."""
    named = {**TRANSFER_CONFIG, **fields}
    dotted = [
        word for key, value in named.items() for word in (f"--kv-transfer-config.{key.replace('__', '.')}", value)
    ]
    return [*dotted, "--prefix-caching-hash-algo", "sha256_cbor"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kv_connector_extra_config__run_dir": "/run/other"}, "/run/other"),
        ({"kv_connector_extra_config": '{"run_dir": "/run/other"}'}, "/run/other"),
        (
            {"kv_connector_extra_config": '{"run_dir": "/run/other"}', "kv_connector_extra_config__copies": "thread"},
            "/run/other",
        ),
        (
            {"kv_connector_extra_config__copies": "thread", "kv_connector_extra_config": '{"run_dir": "/run/other"}'},
            "/run/other",
        ),
        ({"kv_connector_extra_config__hold_deadline_ms": "0"}, "hold_deadline_ms is 0"),
        ({"kv_connector_extra_config": "text"}, "unknown"),
        ({"kv_connector_extra_config": "3", "kv_connector_extra_config__run_dir": "/run/other"}, "/run/other"),
    ],
)
def test_fields_behind_dots_are_nested(fields: dict[str, str], said: str) -> None:
    """Each dot is a step into an object, and a value is JSON where it can be, as vLLM takes them."""
    (finding,) = problems(behind_dots(**fields))

    assert (finding.level, said in finding.text) == ("fail", True), finding


def test_good_fields_behind_dots_have_no_problem() -> None:
    """Numbers and objects behind dots are those of the same JSON."""
    assert problems(behind_dots(kv_connector_extra_config__hold_deadline_ms="500", kv_rank="0")) == []
    assert problems(behind_dots(kv_connector_extra_config='{"run_dir": "/run/kvcached"}')) == []


def test_object_beside_its_fields_behind_dots_is_not_read() -> None:
    """Where fields stand behind dots, vLLM takes these for the whole of the option."""
    (finding,) = problems([*GOOD, "--kv-transfer-config.kv_role", "kv_consumer"])

    assert (finding.level, finding.fix) == ("fail", "write all fields in one of the two ways")


def joined(*connectors: object, **fields: object) -> list[str]:
    """The good arguments with vLLM's connector that joins others."""
    extra = {"kv_connector_extra_config": {"connectors": list(connectors)}}
    return changed(kv_connector="MultiConnector", kv_connector_module_path=None, **extra, **fields)


def test_connector_that_is_joined_with_others_is_as_good() -> None:
    """What `MultiConnector` joins is looked at: the connector of kvcached's, and nothing of the others."""
    assert problems(joined({"kv_connector": "ExampleConnector"}, TRANSFER_CONFIG)) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (joined({"kv_connector": "ExampleConnector"}, "words"), "MultiConnector joins no connector of kvcached"),
        (changed(kv_connector="MultiConnector", kv_connector_extra_config=[]), "MultiConnector joins no connector"),
        (joined(TRANSFER_CONFIG, kv_load_failure_policy=None), "kv_load_failure_policy is missing"),
        (joined({**TRANSFER_CONFIG, "kv_role": "kv_producer"}), "kv_role is 'kv_producer'"),
    ],
)
def test_what_would_not_work_among_joined_connectors_fails(arguments: list[str], said: str) -> None:
    """VLLM asks `MultiConnector` itself what to do when a load fails; all else is the joined connector's."""
    (problem,) = problems(arguments)
    assert (problem.level, said in problem.text) == ("fail", True)


def test_hashes_that_only_one_python_shares_are_a_warning() -> None:
    """The default algorithm of vLLM works, but not for everybody."""
    assert [finding.level for finding in problems(GOOD[:-2])] == ["warn"]
    assert [finding.level for finding in problems([*GOOD[:-1], "xxhash"], {"PYTHONHASHSEED": "0"})] == ["warn"]
    assert problems([*GOOD[:-1], "xxhash_cbor"], {"PYTHONHASHSEED": "0"}) == []


def test_devices_are_checked_as_devices(tmp_path: Path) -> None:
    """On CUDA devices small blocks and latent attention are no problem, sleep mode is, and blocks have 16 tokens."""
    arguments = parse([*GOOD, "--block-size", "16"])
    assert [each.level for each in check_flags(arguments, {}, RUN_DIR, on_cuda=True)] == ["ok"]
    sleeping = parse([*GOOD, "--enable-sleep-mode"])
    assert [each.level for each in check_flags(sleeping, {}, RUN_DIR)] == ["ok"]
    finding, _ = check_flags(sleeping, {}, RUN_DIR, on_cuda=True)
    assert (finding.level, finding.fix) == ("warn", "vLLM 0.33 or newer, or leave out --enable-sleep-mode")

    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "kv_lora_rank": 512}))
    assert [each.level for each in check_model(str(tmp_path), parse([]))] == ["fail"]
    assert list(check_model(str(tmp_path), parse([]), on_cuda=True)) == []
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (layout,) = check_layout(str(tmp_path), parse([]), OFFERED, on_cuda=True)
    assert layout.text.startswith("a block of 16 tokens takes ")


# --- layout ---------------------------------------------------------------------------------------------------------


def layout_of(folder: Path, *arguments: str, slab_bytes: int = 1 << 20, **fields: object) -> Finding:
    (folder / "config.json").write_text(json.dumps({**MODEL, **fields}))
    offered = OffloadInfo(slabs=4, slab_bytes=slab_bytes, namespaces_max=2, verify=Verify.ALWAYS)
    (finding,) = check_layout(str(folder), parse(arguments), offered)
    return finding


def test_layout_is_compared_with_the_slabs(tmp_path: Path) -> None:
    """The bytes of a block follow from model and arguments; a slab that is too small has a fix that is not."""
    finding = layout_of(tmp_path, "--block-size", "32", "--dtype", "float32", "-tp", "2")
    assert (finding.level, "32 tokens takes 8192 bytes" in finding.text) == ("ok", True)

    small = layout_of(tmp_path, "--dtype=half", slab_bytes=1 << 14)
    wanted = next(int(word) for word in small.fix.split() if word.isdecimal())
    assert small.level == "fail"
    assert layout_of(tmp_path, "--dtype=half", slab_bytes=wanted).level == "ok"


def test_layout_that_is_the_same_on_all_shards_needs_room_once(tmp_path: Path) -> None:
    """Of a model with one head of K and V a slab holds a block that it could not hold for each shard."""
    block_bytes = 16384  # 32 tokens, 2 layers, K and V, of 32 floats
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 2}
    arguments = ("--block-size", "32", "--dtype", "float32", "-tp", "4")

    finding = layout_of(tmp_path, *arguments, slab_bytes=2 * block_bytes, **heads)

    assert finding.level == "ok", finding
    assert f"takes {block_bytes} bytes on each of 4 shards, and is held once for all; 1 of them" in finding.text


def test_layout_of_a_pipeline_stage_has_its_layers(tmp_path: Path) -> None:
    """Two stages of two ranks are four shards, each with half of the layers; stages need as many layers each."""
    arguments = ("--block-size", "32", "--dtype", "float32", "-tp", "2", "-pp", "2")
    finding = layout_of(tmp_path, *arguments, num_hidden_layers=4)
    alone = layout_of(tmp_path, *arguments[:-2], num_hidden_layers=2)
    assert finding.level == "ok"
    assert finding.text == alone.text.replace("of 2 shards", "of 4 shards").replace("; 63 of", "; 31 of")

    refused = layout_of(tmp_path, *arguments, num_hidden_layers=3)
    assert (refused.level, refused.text) == ("fail", "2 pipeline stages have unlike parts of 3 layers")


def test_layout_has_the_type_that_vllm_takes(tmp_path: Path) -> None:
    """Where no argument names one, vLLM takes bfloat16 for a model in float32 or without a type, else the model's."""
    for name, value in (("dtype", "float32"), ("torch_dtype", "float32"), ("dtype", None), ("dtype", "float16")):
        assert "32 tokens takes 8192 bytes" in layout_of(tmp_path, "--block-size", "32", **{name: value}).text  # type: ignore[arg-type]
    assert "takes 16384 bytes" in layout_of(tmp_path, "--block-size", "32", "--dtype=float", dtype="float32").text


def test_layout_of_a_model_with_windows_is_that_of_full_attention(tmp_path: Path) -> None:
    """Layers with sliding windows keep their blocks as all others, so that they count like them."""
    mixed = layout_of(tmp_path, "--block-size", "32", layer_types=["sliding_attention", "full_attention"])
    assert mixed == layout_of(tmp_path, "--block-size", "32")


# --- models ---------------------------------------------------------------------------------------------------------


def model_problems(folder: Path, *arguments: str, **fields: object) -> list[Finding]:
    (folder / "config.json").write_text(json.dumps({**MODEL, "max_position_embeddings": 32768, **fields}))
    return list(check_model(str(folder), parse(arguments)))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kv_lora_rank": 512}, "multi-head latent attention"),
        ({"text_config": {"kv_lora_rank": 512}}, "multi-head latent attention"),
        (
            {"layer_types": ["linear_attention", "full_attention"]},
            "with states (linear_attention), which the connector",
        ),
        ({"architectures": ["HrmTextForCausalLM"]}, "HrmTextForCausalLM attends to the whole prompt"),
        ({"mamba_d_state": 64}, "with states (state space), which the connector"),
        ({"layer_types": ["linear_attention"] * 2}, "none with attention"),
        ({"layer_types": ["hyena", "full_attention"]}, "not attention (hyena)"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding windows of 4096 tokens"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 512}, "sliding windows of 512 tokens"),
    ],
)
def test_models_that_vllm_or_the_connector_refuse(tmp_path: Path, fields: dict[str, object], said: str) -> None:
    """What would be refused when vLLM starts, after a minute, is said at once, with what to do."""
    (finding,) = model_problems(tmp_path, **fields)
    assert (finding.level, bool(finding.fix)) == ("fail", True)
    assert said in finding.text


def test_hybrid_connector_takes_windows(tmp_path: Path) -> None:
    """With the connector for several groups of layers, neither the flag nor windows in all layers are a problem."""
    hybrid = changed(kv_connector=HYBRID_CONNECTOR)
    assert problems(hybrid) == problems(changed())
    assert model_problems(tmp_path, *hybrid, model_type="mistral", sliding_window=4096) == []


STATES = {"layer_types": ["conv", "full_attention"]}


@pytest.mark.parametrize("fields", [STATES, {"layer_types": ["mamba", "attention"]}, {"mamba_d_state": 64}])
def test_hybrid_connector_takes_states(tmp_path: Path, fields: dict[str, object]) -> None:
    """With the connector for several groups of layers, states beside attention are no problem."""
    assert model_problems(tmp_path, *changed(kv_connector=HYBRID_CONNECTOR), **fields) == []


@pytest.mark.parametrize(
    ("flags", "left_out"),
    [
        (["--no-enable-prefix-caching"], "--no-enable-prefix-caching"),
        (["--speculative-config", "{}"], "--speculative-config"),
        (["-sc.method", "ngram"], "--speculative-config"),
    ],
)
def test_states_are_refused_with_some_flags(tmp_path: Path, flags: list[str], left_out: str) -> None:
    """Without prefix caching vLLM keeps no states, and speculative decoding is refused with several groups."""
    (finding,) = model_problems(tmp_path, *changed(kv_connector=HYBRID_CONNECTOR), *flags, **STATES)
    assert (finding.level, finding.fix) == ("fail", f"leave out {left_out}")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sliding_window": None},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]},
        {"model_type": "gemma2", "sliding_window": 4096},
        {"kv_lora_rank": None},
    ],
)
def test_models_that_are_taken(tmp_path: Path, fields: dict[str, object]) -> None:
    """Full attention, windows in some layers only, and windows that are switched off are no problem."""
    assert model_problems(tmp_path, **fields) == []


def test_context_within_the_window_is_taken(tmp_path: Path) -> None:
    """Where no context is longer than the window of all layers, no block is dropped."""
    assert model_problems(tmp_path, "--max-model-len", "4096", model_type="mistral", sliding_window=4096) == []
    assert model_problems(tmp_path, "--max-model-len=4097", model_type="mistral", sliding_window=4096) != []


def test_model_that_is_not_here_has_no_problem() -> None:
    """A name of the hub is not looked up."""
    assert list(check_model("org/model", VllmFlags())) == []


def test_model_that_is_nested_too_deeply_is_a_warning(tmp_path: Path) -> None:
    """Of a config.json that no parser reads, the doctor says that it does not tell the size of a block, and goes on."""
    (tmp_path / "config.json").write_text(DEEP)

    assert list(check_model(str(tmp_path), VllmFlags())) == []
    (finding,) = check_layout(str(tmp_path), VllmFlags(), OFFERED)
    assert (finding.level, "nested too deeply" in finding.text) == ("warn", True)
    assert problems([*GOOD, "--pooler-config", DEEP]) == []


def test_layout_that_is_not_told_is_a_warning(tmp_path: Path) -> None:
    """A model whose blocks cannot be worked out, or that is not here, stops nobody."""
    assert layout_of(tmp_path, num_hidden_layers=0).level == "warn"
    assert layout_of(tmp_path, layer_types=["linear_attention"]).level == "warn"
    assert [finding.level for finding in check_layout("org/model", VllmFlags(), OFFERED)] == ["warn"]
    assert layout_of(tmp_path, "--block-size", "big").level == "warn"


# --- hashes ---------------------------------------------------------------------------------------------------------


def said(*hashes: str, error: str = "") -> dict[str, object]:
    return {"hashes": list(hashes), "error": error}


def test_hashes_of_two_processes_are_compared() -> None:
    """Alike is ok, differing fails, an error fails, and without vLLM nothing is said."""
    levels = [
        [finding.level for finding in _agreement("sha256", one, other, {})]
        for one, other in (
            (said("aa"), said("aa")),
            (said("aa"), said("bb")),
            (said("aa"), said(error="no module")),
            (said(), said()),
        )
    ]
    assert levels == [["ok"], ["fail"], ["fail"], []]


def test_hashes_by_cbor_are_compared_with_our_own() -> None:
    """What vLLM computes by cbor is what `kvcached explain` computes, with the environment's seed."""
    ours = [each.hex() for each in block_hashes(HASHED_TOKENS, VllmHashing(HASH_BLOCK_SIZE, seed="7"))]

    for environment, level in (({"PYTHONHASHSEED": "7"}, "ok"), ({}, "warn")):
        (finding,) = _agreement("sha256_cbor", said(*ours), said(*ours), environment)
        assert finding.level == level


DAEMON_MEMORY = changed(kv_connector_extra_config={"device_memory": "daemon"})
SIZES = ["--kv-cache-memory-bytes=1G", "--gpu-memory-utilization=0.3"]


@pytest.mark.parametrize(
    ("more", "on_cuda", "level", "words"),
    [
        ([], False, "warn", "the size of vLLM's KV cache depends"),
        (SIZES[:1], True, "warn", "vLLM counts what the daemon keeps on the device as used by somebody else"),
        ([*SIZES, "--enable-sleep-mode"], True, "fail", "--enable-sleep-mode: the connector refuses it beside"),
        ([*SIZES, "--no-enable-prefix-caching"], False, "fail", "--no-enable-prefix-caching: the connector refuses"),
        ([*SIZES, "--speculative-config", "{}"], True, "fail", "--speculative-config: the connector refuses"),
        ([*SIZES, "-sc", "{}"], True, "fail", "--speculative-config: the connector refuses"),
        ([*SIZES, "--speculative-config.method=ngram"], True, "fail", "--speculative-config: the connector refuses"),
    ],
)
def test_memory_of_the_daemon_that_would_be_of_no_use(more: list[str], on_cuda: bool, level: str, words: str) -> None:
    """What the connector refuses beside memory of the daemon fails; what keeps it from being found is a warning."""
    found = list(check_flags(parse([*DAEMON_MEMORY, *more]), {}, RUN_DIR, on_cuda=on_cuda))
    assert (level, words) in [(each.level, each.text[: len(words)]) for each in found]


@pytest.mark.parametrize("on_cuda", [False, True])
def test_memory_of_the_daemon_is_no_fault(on_cuda: bool) -> None:
    """With a fixed size, and room on the device, nothing is found."""
    found = check_flags(parse([*DAEMON_MEMORY, *SIZES]), {}, RUN_DIR, on_cuda=on_cuda)
    assert [each.level for each in found] == ["ok"]
