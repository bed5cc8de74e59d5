"""`kvcached doctor` against a real daemon, with interpreters that have or lack what an engine needs."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvcached.cli.main import main
from kvcached.doctor.checks import examine, examine_cuda
from kvcached_client import Admin
from kvcached_client.doctor.checks import Finding
from kvcached_client.offload import OffloadClient, OffloadLayout, new_instance
from tests.daemon.conftest import CONFIG, RunningDaemon, started

OFFLOAD = """
[host]
size_bytes = 8_388_608
slab_bytes = 1_048_576

[offload]
namespaces_max = 1
"""
#: A vLLM as small as the checks allow: the names that they use, and hashes of its own.
FAKE_VLLM = {
    "vllm/__init__.py": "",
    "vllm/utils/__init__.py": "",
    "vllm/utils/hashing.py": "import hashlib\n"
    "def get_hash_fn_by_name(name): return lambda value: hashlib.sha256(repr(value).encode()).digest()",
    "vllm/v1/__init__.py": "",
    "vllm/v1/core/__init__.py": "",
    "vllm/v1/core/kv_cache_utils.py": "import os\nROOT = b''\n"
    "def init_none_hash(f):\n    global ROOT\n    ROOT = ROOT_VALUE\n"
    "def hash_block_tokens(f, parent, tokens): return f((parent or ROOT, tokens))",
    "vllm-0.32.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n",
    "vllm-0.32.0.dist-info/top_level.txt": "vllm\n",
    "vllm-0.32.0.dist-info/RECORD": "",
}


@pytest.fixture(scope="module")
def offload_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """A daemon with a replica, that serves engines in offload mode, too: one namespace of them."""
    with started(tmp_path_factory.mktemp("d"), CONFIG + OFFLOAD) as running:
        yield running


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tests' interpreters are told is not what this one was told."""
    for name in [name for name in os.environ if name.startswith("KVCACHED_")]:
        monkeypatch.delenv(name)


def by_level(findings: list[Finding], level: str) -> list[str]:
    return [finding.check for finding in findings if finding.level == level]


def test_doctor_finds_a_good_environment_good(offload_daemon: RunningDaemon) -> None:
    """Nothing fails, real bytes went to the host pool and back, and nothing of them is left."""
    result = CliRunner().invoke(main, ["doctor", "--json", "--run-dir", str(offload_daemon.run_dir)])
    printed = json.loads(result.stdout)
    findings = [Finding(**fields) for fields in printed["findings"]]

    assert (result.exit_code, printed["ok"], by_level(findings, "fail")) == (0, True, [])
    steps = ["sockets", "daemon", "credentials", "offload mode", "memory", "round trip"]
    assert [check for check in by_level(findings, "ok") if check in steps] == steps
    (trip,) = (each.text for each in findings if each.check == "round trip")
    assert trip.endswith("cleared; reports list the empty namespace 'doctor' from now on")
    with Admin.connect(offload_daemon.run_dir) as admin:
        (host,) = (host for host in admin.stats().hosts if host.label == "doctor")
        assert (host.sessions, host.leases, host.slabs, admin.check().violations) == (0, 0, 0, ())


def test_doctor_takes_nothing_from_others(offload_daemon: RunningDaemon) -> None:
    """Where another namespace would be forgotten for it, the round trip is left out with a warning."""
    layout = OffloadLayout(block_size=32, shards=1, block_bytes=4096, fingerprint=b"f" * 16)
    with OffloadClient.connect(
        offload_daemon.run_dir,
        engine="engine",
        instance=new_instance(),
        keyspace=b"k" * 32,
        label="model",
        layout=layout,
        deadline_ms=5000,
    ):
        pass

    findings = list(examine(sys.executable, offload_daemon.run_dir, "", ()))

    assert (by_level(findings, "fail"), "round trip" in by_level(findings, "warn")) == ([], True)
    with Admin.connect(offload_daemon.run_dir) as admin:
        assert [host.label for host in admin.stats().hosts if not host.replicas] == ["model"]


def test_doctor_without_a_daemon(tmp_path: Path) -> None:
    """A run directory without sockets is one failure; what needs no daemon is checked all the same."""
    arguments = ["doctor", "--run-dir", str(tmp_path / "none"), "--", "--prefix-caching-hash-algo", "sha256_cbor"]
    result = CliRunner().invoke(main, arguments)

    lines = result.stdout.splitlines()
    failed = [number for number, line in enumerate(lines) if line.startswith("FAIL")]
    assert [lines[number].split(":")[0] for number in failed] == ["FAIL  sockets", "FAIL  vllm flags"]
    assert all(lines[number + 1].startswith("      fix: ") for number in failed)
    assert (result.exit_code, lines[-1].startswith("2 failed")) == (1, True)
    assert any(line.startswith("ok    packages: ") for line in lines)


@pytest.mark.parametrize(
    ("program", "check", "said"),
    [
        ("exit 3", "python", "exit status 3"),
        ("echo 3 9", "python", "is version 3.9"),
        ("echo hello", "python", "has not printed its version"),
        (f'exec {sys.executable} -S "$@"', "client", "No module named"),
        (
            f'case "$*" in *doctor*) echo no doctor here >&2; exit 7;; esac; exec {sys.executable} "$@"',
            "engine",
            "no doctor here",
        ),
    ],
)
def test_doctor_with_an_interpreter_that_lacks_something(tmp_path: Path, program: str, check: str, said: str) -> None:
    """An interpreter that does not run, is too old, has no client or breaks off is one failure that says so."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)

    findings = list(examine(str(python), tmp_path, "", ()))

    (failed,) = (finding for finding in findings if finding.level == "fail")
    assert (failed.check, said in failed.text, failed.fix != "") == (check, True, True), failed


@pytest.mark.end_to_end
def test_doctor_takes_an_interpreter_that_prints_at_its_start(tmp_path: Path) -> None:
    """What an interpreter prints before and after its version, and beside the findings, is passed over."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho hello 1; echo 7; echo; {sys.executable} "$@"; echo bye 3 11 now\n')
    python.chmod(0o755)

    findings = list(examine(str(python), tmp_path, "", ()))

    assert by_level(findings, "fail") == ["sockets"]
    assert {"interpreter", "client", "limits"} <= set(by_level(findings, "ok"))


@pytest.mark.end_to_end
def test_doctor_needs_no_directory_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container whose file system is read only, both ways of asking an interpreter say why it broke off."""
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/directory")
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *doctor*) echo no doctor here >&2; exit 7;; esac; echo 3 11\n')
    python.chmod(0o755)

    for findings in (examine(str(python), tmp_path, "", ()), examine_cuda(str(python))):
        (failed,) = (finding for finding in findings if finding.level == "fail")
        assert "no doctor here" in failed.text


def install_fake_vllm(folder: Path, monkeypatch: pytest.MonkeyPatch, root: str = "b'root'", **more: str) -> None:
    """The fake vLLM, for interpreters that tests start; `more` are further modules of it."""
    for name, text in {**FAKE_VLLM, **{f"vllm/{module}.py": text for module, text in more.items()}}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("ROOT_VALUE", root))
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.parametrize("device", ["cpu", "cuda", ""])
def test_doctor_asks_which_device_vllm_computes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """What vLLM refuses on CPUs only is no problem where it computes on CUDA devices; unknown counts as a CPU."""
    platform = f"class current_platform: device_type = {device!r}" if device else "raise ImportError"
    install_fake_vllm(tmp_path, monkeypatch, platforms=platform)

    findings = list(examine(sys.executable, tmp_path, "", ["--block-size", "16"]))

    assert any("multiples of 32" in finding.text for finding in findings) == (device != "cuda")


@pytest.mark.parametrize(("root", "level"), [("b'root'", "ok"), ("os.urandom(8)", "fail")])
def test_doctor_compares_the_hashes_of_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str, level: str
) -> None:
    """An interpreter whose processes hash alike is ok; one that begins at random is told that it shares nothing."""
    install_fake_vllm(tmp_path, monkeypatch, root)

    findings = list(examine(sys.executable, tmp_path, "", ()))

    levels = {finding.check: finding.level for finding in findings}
    assert (levels["vllm"], levels["hashes"]) == ("ok", level)
    assert levels["connector"] == "fail"  # it needs the real one


def test_doctor_checks_sglang_instead_of_vllm(offload_daemon: RunningDaemon) -> None:
    """With --sglang, the arguments are SGLang's, SGLang has to be there, and vLLM is not asked about."""
    run_dir = str(offload_daemon.run_dir)
    arguments = ["--tp", "2", "--enable-hicache", "--hicache-storage-backend", "dynamic"]
    result = CliRunner().invoke(main, ["doctor", "--sglang", "--json", "--run-dir", run_dir, "--", *arguments])

    findings = [Finding(**fields) for fields in json.loads(result.stdout)["findings"]]
    assert (result.exit_code, by_level(findings, "fail")) == (1, ["sglang", "sglang flags", "namespaces"])
    assert {"daemon", "offload mode"} <= set(by_level(findings, "ok"))
    assert "vllm" not in {finding.check for finding in findings}
