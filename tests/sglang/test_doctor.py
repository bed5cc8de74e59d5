"""`kvcached doctor --sglang` in real SGLang's environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvcached.cli.main import main
from tests.project.source_tree import ROOT
from tests.sglang.sglang_process import PAGE_SIZE, STORAGE, interpreter
from tests.vllm.cache_daemon import CacheDaemon

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


def test_doctor_finds_nothing_wrong(model: Path, daemon: CacheDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment and the arguments that these tests use pass every check."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/sglang/cpu"))
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    flags = ["--enable-hierarchical-cache", "--hicache-storage-backend", "dynamic"]
    flags += ["--page-size", str(PAGE_SIZE), "--dtype", "float32"]
    extra = ["--hicache-storage-backend-extra-config", json.dumps(STORAGE)]
    checks = ["doctor", "--sglang", "--json", "--python", str(interpreter()), "--run-dir", str(daemon.run_dir)]
    result = CliRunner().invoke(main, [*checks, "--", "--model-path", str(model), *flags, *extra])

    findings = {finding["check"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert (result.exit_code, [each for each in findings.values() if each["level"] != "ok"]) == (0, [])
    assert findings.keys() >= {"sglang", "hooks", "storage backend", "round trip", "sglang flags", "layout"}
