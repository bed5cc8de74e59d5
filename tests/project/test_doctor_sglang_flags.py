"""SGLang's arguments, as `kvcached doctor --sglang` reads them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvcached.doctor.sglang_flags import SglangFlags, check_flags, check_model, check_namespaces, parse
from kvcached_client.doctor.checks import Finding
from kvcached_client.protocol.engine import OffloadInfo
from kvcached_client.sglang.settings import EXTRA_CONFIG
from kvcached_client.types import Verify
from tests.project.source_tree import ROOT

RUN_DIR = Path("/run/kvcached")
HIERARCHY = ["--model-path", "/m", "--enable-hierarchical-cache", "--hicache-storage-backend", "dynamic"]
EXTRA = "--hicache-storage-backend-extra-config"


def arguments(extra: str) -> list[str]:
    return [*HIERARCHY, EXTRA, extra]


def changed(**fields: Any) -> list[str]:
    """Good arguments with other fields in the extra configuration; None takes one out."""
    config = {name: value for name, value in {**EXTRA_CONFIG, **fields}.items() if value is not None}
    return arguments(json.dumps(config))


GOOD = changed()


def problems(given: list[str]) -> list[Finding]:
    """What is found, apart from what is ok."""
    found = list(check_flags(parse(given), RUN_DIR))
    assert any(finding.level == "ok" for finding in found) != any(finding.level == "fail" for finding in found)
    assert all(finding.fix for finding in found if finding.level != "ok")
    return [finding for finding in found if finding.level != "ok"]


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        (["serve", "m", "--tp", "2"], SglangFlags({"tp-size": "2"}, ["serve", "m"])),
        (["--model=m", "--enable-hicache"], SglangFlags({"model-path": "m", "enable-hierarchical-cache": ""})),
        (["--tensor_parallel_size", "4"], SglangFlags({"tp-size": "4"})),
        (["--attention-data-parallel-size", "2"], SglangFlags({"attn-dp-size": "2"})),
    ],
)
def test_arguments_have_sglangs_first_names(given: list[str], flags: SglangFlags) -> None:
    """An option counts by whichever of its names SGLang is given."""
    assert parse(given) == flags


def test_model_and_ranks_are_taken_from_the_arguments() -> None:
    """The model is an option or the word behind "serve"; ranks are those of all parts of the model."""
    assert [parse(given).model for given in (["serve", "m"], ["m"], ["--model", "m"], ["--port", "1"])] == [
        *("m", "m", "m", "")
    ]
    assert [parse(given).ranks for given in ([], ["--tp", "2", "--pp-size=3"], ["--tp", "x"])] == [1, 6, 1]


def test_what_the_guide_starts_has_no_problems() -> None:
    """The command line of the guide passes, and so does one that says the same in other words."""
    guide = (ROOT / "docs/sglang.md").read_text()
    (extra,) = re.findall(rf"{EXTRA} '(.*?)'", guide, re.DOTALL)
    assert not problems(arguments(extra))
    assert not problems(changed(backend_name="mine", interface_v1=True, prefetch_threshold=64))
    assert not problems(changed(kvcached={"run_dir": "/run/./kvcached", "deadline_ms": 500}))
    assert not problems(changed(prefetch_timeout_base=0.5, prefetch_timeout_per_ki_token=1, tp_lcm_size=0))
    assert not problems([*GOOD, "--hicache-mem-layout", "layer_first"])
    assert not problems([*GOOD, "--hicache-write-policy", "write_through", "--dcp-size", "1"])


@pytest.mark.parametrize(
    ("given", "said", "fix"),
    [
        (GOOD[:2] + GOOD[3:], "--enable-hierarchical-cache is missing", "add --enable-hierarchical-cache"),
        ([*GOOD, "--disable-radix-cache"], "--disable-radix-cache", "leave out --disable-radix-cache"),
        ([*GOOD, "--hicache-storage-backend", "file"], "is file", "--hicache-storage-backend dynamic"),
        ([*GOOD, "--hicache-mem-layout", "page_head"], "page_head is not served", "page_first"),
        ([*GOOD, "--speculative-algorithm", "EAGLE"], "speculative", "leave out --speculative-algorithm"),
        ([*GOOD, "--hicache-write-policy", "write_back"], "end of a prompt", "leave out --hicache-write-policy"),
        ([*GOOD, "--hicache-host-memory-mode=buffer_only"], "load none", "leave out --hicache-host-memory-mode"),
        ([*GOOD, "--disaggregation-decode-enable-offload-kvcache"], "none would be stored", "leave out --disagg"),
        ([*GOOD, "--dcp-size", "2"], "decode context parallelism", "leave out --dcp-size"),
        ([*GOOD, "--decode-context-parallel-size=4"], "decode context parallelism", "leave out --dcp-size"),
        (HIERARCHY, f"{EXTRA} is missing", f"add {EXTRA} '{{"),
        (arguments("{"), "is no JSON object", f"write {EXTRA} '{{"),
        (arguments("[" * 100_000), "is no JSON object", f"write {EXTRA} '{{"),
        (arguments("[]"), "is no JSON object", f"write {EXTRA} '{{"),
        (arguments("@/none/there.json"), "No such file", "name a file"),
        (changed(backend_name=None), "backend_name is missing", '"backend_name": "kvcached"'),
        (changed(module_path="other"), "module_path is 'other'", '"module_path": "kvcached_client.sglang"'),
        (changed(class_name=None), "class_name is missing", '"class_name": "KvcachedStorage"'),
        (changed(interface_v1=0), "interface_v1 is 0", '"interface_v1": 1'),
        (changed(hicache_storage_pass_prefix_keys=False), "nothing would be stored", 'prefix_keys": true'),
        (changed(hicache_storage_pass_prefix_keys=1), "prefix_keys is 1", 'prefix_keys": true'),
        (changed(hicache_storage_pass_prefix_keys=[True]), "prefix_keys is [True]", 'prefix_keys": true'),
        (changed(prefetch_threshold="256"), 'prefetch_threshold is "256"', "a whole number for prefetch_threshold"),
        (changed(prefetch_threshold=0.5), "prefetch_threshold is 0.5", "a whole number for prefetch_threshold"),
        (changed(prefetch_timeout_base="1"), "does not start", "a number for prefetch_timeout_base"),
        (changed(prefetch_timeout_per_ki_token=[1]), "does not start", "a number for prefetch_timeout_per"),
        (changed(kvcached={"rundir": "/x"}), "rundir", "correct the table kvcached"),
        (changed(kvcached={"deadline_ms": 9000}), "9000", "correct the table kvcached"),
        (changed(kvcached={"run_dir": "/elsewhere"}), "/elsewhere", "the same run_dir"),
    ],
)
def test_each_mistake_is_one_failure_with_its_fix(given: list[str], said: str, fix: str) -> None:
    """What keeps SGLang from using the daemon is told, with the words that mend it."""
    (finding,) = problems(given)
    assert (finding.level, said in finding.text, fix in finding.fix) == ("fail", True, True), finding


def test_extra_configuration_may_be_in_a_file(tmp_path: Path) -> None:
    """Files of JSON and TOML are read as SGLang reads them; of another one it is said that it is not read."""
    as_json, as_toml, as_yaml = (tmp_path / f"extra.{kind}" for kind in ("json", "toml", "yaml"))
    as_json.write_text(json.dumps(dict(EXTRA_CONFIG)))
    as_toml.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in EXTRA_CONFIG.items()))
    as_yaml.write_text("interface_v1: 1\n")
    assert not problems(arguments(f"@{as_json}"))
    assert not problems(arguments(f"@{as_toml}"))
    (finding,) = problems(arguments(f"@{as_yaml}"))
    assert (finding.level, "is not read" in finding.text) == ("warn", True)


def test_number_of_ranks_that_has_no_effect_is_told() -> None:
    """With tp_lcm_size, SGLangs of several sizes share pages in other storages, but not here."""
    (found,) = problems(changed(tp_lcm_size=4))

    assert (found.level, "no effect" in found.text, found.fix) == ("warn", True, "leave out tp_lcm_size")


def test_decoding_sglang_that_finds_no_pages_is_told() -> None:
    """It works, but whoever expects hits there looks for them in vain."""
    (found,) = problems([*GOOD, "--disaggregation-decode-enable-radix-cache"])

    assert found.level == "warn"
    assert "stores pages in kvcached, and finds none" in found.text


def test_file_of_arguments_is_told() -> None:
    """Options that are in a file of SGLang's are not seen, which is said."""
    (finding,) = problems([*GOOD, "--config", "server.yaml"])
    assert (finding.level, "server.yaml is not read" in finding.text) == ("warn", True)


@pytest.mark.parametrize(
    ("config", "levels"),
    [
        ({"num_hidden_layers": 2}, []),
        ({"layer_types": ["full_attention", "full_attention"]}, []),
        ({"kv_lora_rank": 512}, []),
        ({"layer_types": ["full_attention", "sliding_attention"]}, []),
        ({"text_config": {"layer_types": ["linear_attention"]}}, ["warn"]),
        ({"ssm_state_size": 16}, ["warn"]),
        ({"kv_lora_rank": 512, "index_topk": 2048}, ["warn"]),
    ],
)
def test_layers_that_were_not_tried_are_told(tmp_path: Path, config: dict[str, Any], levels: list[str]) -> None:
    """States, indexers and attention of other kinds are warnings; full attention and sliding windows are fine."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    findings = list(check_model(str(tmp_path)))
    assert [finding.level for finding in findings] == levels
    assert all(finding.fix for finding in findings)


def test_model_that_is_not_here_is_not_looked_up() -> None:
    """A name of the hub says nothing about layers."""
    assert list(check_model("org/model")) == []


@pytest.mark.parametrize(
    ("given", "config", "namespaces"),
    [
        ([], {}, 1),
        (["--tp-size", "3"], {}, 3),
        (["--tp-size", "2", "--pp-size", "3"], {}, 6),
        (["--tp", "8", "--dp", "8", "--enable-dp-attention"], {}, 1),
        (["--tp", "8", "--dp", "2", "--enable-dp-attention", "--pp", "2"], {}, 8),
        (["--tp", "8", "--attn-dp-size", "8"], {}, 1),
        (["--tp", "8", "--attention-data-parallel-size", "2", "--pp", "2"], {}, 8),
        (["--tp", "8", "--attn-dp-size", "4", "--enable-dp-attention"], {}, 2),
        (["--tp", "8", "--dp", "8"], {}, 8),
        (["--tp", "8", "--attn-cp-size", "2"], {}, 8),
        (["--tp", "8", "--attn-dp-size", "2", "--attn-cp-size", "2"], {}, 4),
        (["--tp", "8", "--pp", "2"], {"kv_lora_rank": 512}, 2),
        (["--tp", "8", "--attn-cp-size", "2"], {"kv_lora_rank": 512}, 2),
        (["--tp", "8"], {"kv_lora_rank": 512, "index_topk": 2048}, 2),
        (["--tp", "2"], {"layer_types": ["full_attention", "sliding_attention"]}, 4),
        (["--tp", "2"], {"text_config": {"layer_types": ["full_attention", "linear_attention"]}}, 4),
        (["--tp", "4"], {"kv_lora_rank": 512, "layer_types": ["linear_attention"]}, 5),
    ],
)
def test_namespaces_are_compared_with_what_the_daemon_takes(
    tmp_path: Path, given: list[str], config: dict[str, Any], namespaces: int
) -> None:
    """One for each part of the heads and layers and each pool; with fewer, engines would push each other out."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    for most, failures in ((namespaces, 0), (namespaces - 1, 1)):
        offered = OffloadInfo(slabs=4, slab_bytes=1 << 20, namespaces_max=most, verify=Verify.ALWAYS)
        found = list(check_namespaces(str(tmp_path), parse(given), offered))
        assert [(each.level, f"to {namespaces} or more" in each.fix) for each in found] == [("fail", True)] * failures


def test_namespaces_of_models_that_are_not_here_are_counted_by_rank() -> None:
    """A name of the hub tells nothing about pools and attention."""
    offered = OffloadInfo(slabs=4, slab_bytes=1 << 20, namespaces_max=2, verify=Verify.ALWAYS)
    assert [list(check_namespaces(model, parse(["--tp", "2"]), offered)) for model in ("", "org/model")] == [[], []]
