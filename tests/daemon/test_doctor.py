"""`kvcached doctor` against a real daemon, with interpreters that have or lack what an engine needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcached_client import Admin
from kvcached_client.doctor import Finding
from tests.daemon.conftest import CONFIG, RunningDaemon, started
from tests.project.daemon_process import clean_environment
from tests.project.source_tree import ROOT

ATTACHED = """
[host]
size_bytes = 8_388_608
slab_bytes = 1_048_576

[attached]
namespaces_max = 1
"""
#: A vLLM as small as the checks allow: the names that they use, and hashes as its own.
FAKE_VLLM = {
    "vllm/__init__.py": "",
    "vllm/utils/__init__.py": "",
    "vllm/utils/hashing.py": "import hashlib\ndef get_hash_fn_by_name(name): return lambda v: hashlib.sha256(repr(v).encode()).digest()",
    "vllm/v1/__init__.py": "",
    "vllm/v1/core/__init__.py": "",
    "vllm/v1/core/kv_cache_utils.py": "import os\nROOT = b''\ndef init_none_hash(f):\n    global ROOT\n    ROOT = ROOT_VALUE\n"
    "def hash_block_tokens(f, parent, tokens): return f((parent or ROOT, tokens))",
    "vllm-0.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: VERSION\n",
    "vllm-0.1.dist-info/top_level.txt": "vllm\n",
    "vllm-0.1.dist-info/RECORD": "",
}


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """A daemon with a replica, that serves engines in attached mode, too."""
    with started(tmp_path_factory.mktemp("d"), ATTACHED + CONFIG.replace("heartbeat", "heartbeat", 1)) as running:
        yield running


def doctor(run_dir: Path, *arguments: str, path: Path | None = None) -> tuple[int, list[Finding]]:
    """Exit status and findings; `path` comes before everything that is installed."""
    environment = clean_environment()
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, "-m", "kvcached", "doctor", "--json", "--run-dir", str(run_dir), *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stderr == ""
    printed = json.loads(done.stdout)
    assert printed["ok"] == (done.returncode == 0)
    return done.returncode, [Finding(**fields) for fields in printed["findings"]]


def by_level(findings: list[Finding], level: str) -> list[str]:
    return [finding.check for finding in findings if finding.level == level]


def fake_vllm(folder: Path, *, version: str = "0.32.0", root: str = "b'root'") -> Path:
    """A folder with a package that looks like vLLM."""
    for name, text in FAKE_VLLM.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("VERSION", version).replace("ROOT_VALUE", root))
    return folder
