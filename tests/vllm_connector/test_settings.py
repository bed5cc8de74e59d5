"""What of vLLM's configuration is refused, and how it is said."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_client.vllm.settings import (
    Settings,
    canonical_heads,
    check_config,
    check_device_memory,
    check_version,
    embeddings_warning,
    is_replicated,
    parallel_label,
    read_settings,
    shards_of,
)
from tests.vllm_connector.configs import cache_config, vllm_config

RANKS = "parallel_config__tensor_parallel_size"


def layers(heads_in_group: int | None) -> SimpleNamespace:
    """Layers of a Nemotron NAS model, so many of whose query heads share one of K and V; None = without attention."""
    return SimpleNamespace(attention=SimpleNamespace(n_heads_in_group=heads_in_group))


def test_defaults() -> None:
    """Nothing needs to be said."""
    assert read_settings({}) == Settings(run_dir=None, weights_version="", hold_deadline_ms=1000, prefetch="timeout")


def test_all_keys() -> None:
    """There are seven keys."""
    extra: dict[str, object] = {"run_dir": "/run/x", "weights_version": "3", "hold_deadline_ms": 50, "prefetch": "off"}
    assert read_settings(extra) == Settings("/run/x", "3", 50, "off")
    assert read_settings({"device_memory": "daemon", "on_reset": "keep", "copies": "thread"}) == Settings(
        device_memory="daemon", on_reset="keep", copies="thread"
    )
    assert read_settings({}, "kv_consumer") == Settings(read_only=True)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (
            {"rundir": "/x", "a": 1},
            "a, rundir unknown to KvcachedConnector; it knows copies, device_memory, hold_dead",
        ),
        ({"run_dir": ""}, "run_dir is ''"),
        ({"copies": "fork"}, "copies is 'fork'; give one of process, thread"),
        ({"run_dir": 3}, "run_dir is 3"),
        ({"weights_version": 3}, "weights_version is 3; give a string"),
        ({"hold_deadline_ms": 0}, "hold_deadline_ms is 0; give 1 to 60000"),
        ({"hold_deadline_ms": True}, "hold_deadline_ms is True"),
        ({"hold_deadline_ms": "5"}, "hold_deadline_ms is '5'"),
        ({"hold_deadline_ms": 60_001}, "hold_deadline_ms is 60001"),
        ({"prefetch": "no"}, "prefetch is 'no'; give one of timeout, best_effort, wait_complete, off"),
        ({"prefetch": False}, "prefetch is False"),
        ({"device_memory": True}, "device_memory is True; give one of engine, daemon"),
        ({"on_reset": "no"}, "on_reset is 'no'; give one of clear, keep"),
    ],
)
def test_wrong_keys_and_values_are_refused(extra: dict[str, object], words: str) -> None:
    """An unknown key is refused with those that are known, a wrong value with what is possible."""
    with pytest.raises(ValueError, match="kv_connector_extra_config") as refused:
        read_settings(extra)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device_config__device_type": "xpu"}, "it is for CPUs and CUDA devices, not for 'xpu'"),
        (
            {"device_config__device_type": "cuda", "model_config__enable_sleep_mode": True},
            "vLLM cannot free it to sleep: set no --enable-sleep-mode",
        ),
        (
            {"use_v2_model_runner": True, "kernel_config": SimpleNamespace(enable_jit_warmup=True)},
            "set --kernel-config.enable_jit_warmup=False",
        ),
        ({"cache_config__enable_prefix_caching": False}, "prefix caching is off"),
        ({"speculative_config": object()}, "speculative decoding"),
    ],
)
def test_device_memory_of_the_daemon_is_refused(changes: dict[str, Any], words: str) -> None:
    """Where blocks could not be found again, or not be trusted, vLLM does not start with the setting."""
    taken = vllm_config(**{"cache_config__enable_prefix_caching": True, "speculative_config": None} | changes)
    with pytest.raises(ValueError, match="device_memory cannot be") as refused:
        check_device_memory(taken)
    assert words in str(refused.value)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_device_memory_of_the_daemon_is_taken(kind: str) -> None:
    """On the CPU and on CUDA devices, with prefix caching."""
    taken = vllm_config(
        cache_config__enable_prefix_caching=True,
        speculative_config=None,
        device_config__device_type=kind,
        model_config__enable_sleep_mode=False,
    )
    check_device_memory(taken)


def test_plain_configuration_is_taken() -> None:
    """A model with one kind of attention on one node is served."""
    check_config(vllm_config(), cache_config(), keeps_all_blocks=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"kv_transfer_config__kv_role": "kv_producer"},
            "kv_role is 'kv_producer': set it to 'kv_both', or to 'kv_consumer' to store nothing",
        ),
        ({"kv_transfer_config__kv_load_failure_policy": "fail"}, "set it to 'recompute'"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "context parallelism"),
        ({"parallel_config__nnodes_within_dp": 2}, "workers on 2 nodes cannot map one host pool: run it on"),
        (
            {"parallel_config__distributed_executor_backend": "external_launcher", RANKS: 2},
            "use another --distributed-executor-backend",
        ),
        ({"parallel_config__enable_fault_tolerance": True}, "set no --enable-fault-tolerance"),
        ({"model_config__use_mla": True}, "multi-head latent attention"),
        ({"model_config__is_diffusion": True}, "diffusion"),
        ({"model_config__is_prefix_caching_supported": False}, "MEAN, CLS and STEP pooling"),
        ({"scheduler_config__policy": "priority"}, "--scheduling-policy fcfs, or --no-enable-prefix-caching"),
        ({"device_config__device_type": "xpu"}, "kvcached copies from and to CPUs and CUDA devices, not 'xpu'"),
        ({"device_config__device_type": "cuda", "model_config__enable_sleep_mode": True}, "no --enable-sleep-mode"),
    ],
)
def test_configurations_that_are_refused(changes: dict[str, Any], words: str) -> None:
    """What cannot be served, or would be served wrongly, is refused at the start, with what to do."""
    with pytest.raises(ValueError, match="KvcachedConnector cannot be used here") as refused:
        check_config(vllm_config(**changes), cache_config(), keeps_all_blocks=True)
    assert words in str(refused.value)
    assert str(refused.value).count("\n- ") == 1


@pytest.mark.parametrize("takes_groups", [False, True])
def test_models_that_look_ahead_are_refused(takes_groups: bool) -> None:
    """Both connectors refuse attention to tokens behind a block's end, whether vLLM keeps all blocks or not."""
    for keeps_all_blocks in (True, takes_groups):
        with pytest.raises(ValueError, match=r"as a Prefix LM's do, .*: use no kvcached"):
            check_config(
                vllm_config(),
                cache_config(),
                keeps_all_blocks=keeps_all_blocks,
                looks_ahead=True,
                takes_groups=takes_groups,
            )


def test_data_parallelism_over_several_nodes_is_taken() -> None:
    """Each rank of data parallelism is an engine of its own: only one that is itself on several nodes is refused."""
    config = vllm_config(parallel_config__nnodes=4, parallel_config__nnodes_within_dp=1)
    check_config(config, cache_config(), keeps_all_blocks=True)


def test_latent_attention_on_an_accelerator_is_not_refused_for_that() -> None:
    """Only on the CPU does vLLM compute wrongly with multi-head latent attention and cached blocks."""
    config = vllm_config(model_config__use_mla=True, device_config__device_type="cuda")
    check_config(config, cache_config(), keeps_all_blocks=True)


def test_priorities_are_taken_where_vllm_has_no_cache_of_its_own() -> None:
    """VLLM finds blocks that were not computed in its own cache, so without it priorities do no harm."""
    config = vllm_config(scheduler_config__policy="priority", cache_config__enable_prefix_caching=False)
    check_config(config, cache_config(), keeps_all_blocks=True)


@pytest.mark.parametrize(
    ("cache_gb", "has_prefixes", "is_refused"), [(0, False, True), (0, True, False), (4, False, False)]
)
def test_pictures_that_vllm_counts_are_refused(cache_gb: float, has_prefixes: bool, is_refused: bool) -> None:
    """With neither of its caches, vLLM gives each process's first picture the same name, whatever is in it."""
    media = SimpleNamespace(mm_processor_cache_gb=cache_gb)
    config = vllm_config(model_config__multimodal_config=media, cache_config__enable_prefix_caching=has_prefixes)
    with pytest.raises(ValueError, match="--mm-processor-cache-gb") if is_refused else nullcontext():
        check_config(config, cache_config(), keeps_all_blocks=True)


def test_single_rank_of_an_external_launcher_is_taken() -> None:
    """Where the only rank has the only scheduler, it does not matter who has launched it."""
    config = vllm_config(parallel_config__distributed_executor_backend="external_launcher")
    check_config(config, cache_config(), keeps_all_blocks=True)


@pytest.mark.parametrize(
    ("media", "is_told"),
    [
        (None, False),
        (SimpleNamespace(enable_mm_embeds=True, allow_missing_mm_embeddings=False), False),
        (SimpleNamespace(enable_mm_embeds=True, allow_missing_mm_embeddings=True), True),
    ],
)
def test_embeddings_that_clients_may_send_are_told(media: object, is_told: bool) -> None:
    """People hear of embeddings that vLLM takes for the connector's sake, not of those that they allow themselves."""
    warning = embeddings_warning(vllm_config(model_config__multimodal_config=media))
    assert (warning is not None and "--language-model-only" in warning) is is_told


@pytest.mark.parametrize("groups", [0, 2])
def test_hybrid_models_are_refused(groups: int) -> None:
    """Several groups of layers with caches of their own are refused: vLLM makes them one where that is possible."""
    with pytest.raises(ValueError, match="states have beside attention; one is supported"):
        check_config(vllm_config(), cache_config(groups), keeps_all_blocks=True)


def test_window_attention_is_refused() -> None:
    """One group whose layers do not attend to all tokens is refused: vLLM drops its blocks behind the window."""
    with pytest.raises(ValueError, match="--max-model-len"):
        check_config(vllm_config(), cache_config(), keeps_all_blocks=False)


@pytest.mark.parametrize("groups", [1, 2])
def test_groups_and_windows_are_taken_by_the_hybrid_connector(groups: int) -> None:
    """The other connector takes several groups, and one whose blocks vLLM drops, but no draft model beside them."""
    check_config(vllm_config(), cache_config(groups), keeps_all_blocks=False, takes_groups=True)
    drafting = vllm_config(speculative_config=object())
    with pytest.raises(ValueError, match="speculative decoding beside several groups"):
        check_config(drafting, cache_config(groups), keeps_all_blocks=False, takes_groups=True)
    check_config(drafting, cache_config(), keeps_all_blocks=True, takes_groups=True)


def test_model_without_a_cache_is_refused_by_both() -> None:
    """A model whose layers keep nothing has no groups."""
    with pytest.raises(ValueError, match="0 groups of layers"):
        check_config(vllm_config(), cache_config(0), keeps_all_blocks=False, takes_groups=True)


def test_all_reasons_are_told_at_once() -> None:
    """Whoever has several things to mend is told all of them."""
    changes = {"kv_transfer_config__kv_load_failure_policy": "fail", "parallel_config__nnodes_within_dp": 2}
    with pytest.raises(ValueError, match="recompute") as refused:
        check_config(vllm_config(**changes), cache_config(), keeps_all_blocks=True)
    assert str(refused.value).count("\n- ") == 2


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0rc1", "0.32", "0.33.12.dev3+gabc"])
def test_supported_versions(version: str) -> None:
    """0.32 and 0.33 are supported, whatever follows."""
    assert check_version(version)


@pytest.mark.parametrize("version", ["0.34.0", "0.100.0rc1", "1.0.0"])
def test_newer_versions_are_not_refused_by_their_number(version: str) -> None:
    """A version beyond the supported range is left to the check of its interface."""
    assert not check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.3.2", "dev", ""])
def test_older_versions_are_refused(version: str) -> None:
    """An older version, or one without a number, is refused, with the range and what to install."""
    with pytest.raises(RuntimeError, match=r"supports >=0\.32,<0\.34: install") as refused:
        check_version(version)
    assert f"version {version}," in str(refused.value)


def test_only_the_connector_needs_vllm() -> None:
    """The package and all its parts but the connector and its metrics can be imported without vLLM and torch."""
    program = """
import sys, kvcached_client.vllm, kvcached_client.vllm.scheduling.scheduler, kvcached_client.vllm.daemon.thread
import kvcached_client.vllm.worker, kvcached_client.vllm.identity, kvcached_client.vllm.settings
import kvcached_client.vllm.settings
print(sorted({"vllm", "torch"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("heads", "use_mla", "ranks", "expected"),
    [(1, False, 2, True), (8, True, 4, True), (1, False, 1, False), (2, False, 2, False), (2, False, 4, False)],
    ids=["one head", "latent", "one rank", "a head each", "a head for two"],
)
def test_blocks_are_the_same_on_all_ranks_where_there_is_one_head(
    heads: int, use_mla: bool, ranks: int, expected: bool
) -> None:
    """Only an only head, or latent attention, is computed alike by every one of several ranks."""
    config = vllm_config(model_config__use_mla=use_mla, parallel_config__tensor_parallel_size=ranks)
    config.model_config.get_total_num_kv_heads = lambda: heads
    assert is_replicated(config, has_states=False) is expected
    config.parallel_config.pipeline_parallel_size = 2
    assert not is_replicated(config, has_states=False)


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"swa_num_key_value_heads": 2}, False),
        ({"num_key_value_heads_per_layer": [1, 1, 4]}, False),
        ({"attention_other_setting": {"num_attention_groups": 2}}, False),
        ({"num_attention_heads": 8, "block_configs": [{"attention": {"n_heads_in_group": 2}}]}, False),
        ({"num_attention_heads": 8, "block_configs": [layers(8), layers(4)]}, False),
        ({"num_attention_heads": 8, "block_configs": [layers(8), layers(None)]}, True),
        ({"swa_num_key_value_heads": 1, "cross_num_key_value_heads": None, "attention_other_setting": {}}, True),
        ({"multi_query": True, "num_kv_heads": 71}, True),
        ({"cross_num_key_value_heads": 8, "encoder_kv_heads": [8, 8]}, True),
    ],
)
@pytest.mark.parametrize("use_mla", [False, True])
def test_blocks_are_not_the_same_where_some_layers_have_more_heads(
    named: dict[str, Any], expected: bool, use_mla: bool
) -> None:
    """VLLM names one number of heads for all layers: where others have more than one, ranks divide theirs."""
    config = vllm_config(model_config__use_mla=use_mla, parallel_config__tensor_parallel_size=4)
    config.model_config.get_total_num_kv_heads = lambda: 1
    config.model_config.hf_config.config = named
    assert is_replicated(config, has_states=False) is expected


@pytest.mark.parametrize(("named", "most", "expected"), [(2, 8, 2), (8, 2, 8), (1, 4, 4), (1, 1, 1)])
def test_heads_of_the_canonical_layout_are_those_that_vllm_names(named: int, most: int, expected: int) -> None:
    """A number for some layers, which there may be none of, changes them only where it tells heads from an only one."""
    config = vllm_config(model_config__get_total_num_kv_heads=lambda: named)
    config.model_config.hf_config.config = {"swa_num_key_value_heads": most}
    assert canonical_heads(config) == expected


def test_each_rank_of_each_pipeline_stage_has_a_part_of_a_block() -> None:
    """Workers are counted over stages, and people see both numbers."""
    config = vllm_config(parallel_config__tensor_parallel_size=2, parallel_config__pipeline_parallel_size=4)

    check_config(config, cache_config(), keeps_all_blocks=True)
    assert (shards_of(config), parallel_label(config)) == (8, "tp2 pp4")


def test_states_and_heads_of_a_draft_are_each_ranks_own() -> None:
    """Beside an only head, ranks divide states, and the heads of a draft model: their blocks differ."""
    config = vllm_config(parallel_config__tensor_parallel_size=2)
    config.model_config.get_total_num_kv_heads = lambda: 1
    draft = vllm_config(model_config__get_total_num_kv_heads=lambda: 1).model_config
    config.speculative_config = SimpleNamespace(draft_model_config=draft)

    assert is_replicated(config, has_states=False)
    assert not is_replicated(config, has_states=True)
    draft.get_total_num_kv_heads = lambda: 2
    assert not is_replicated(config, has_states=False)
