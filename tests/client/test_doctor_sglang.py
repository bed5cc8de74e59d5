"""What the doctor finds in SGLang's interpreter, with as much of SGLang as it looks at."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pkgutil
import sys
from pathlib import Path

import pytest

from kvcached_client.doctor.sglang import sglang_findings
from tests.sglang.fake_sglang import FakeSglang, UnifiedRadixCache


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSglang:
    """SGLang, to be imported."""
    fake = FakeSglang(tmp_path)
    fake.install(monkeypatch)
    find, version = importlib.util.find_spec, importlib.metadata.version
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "sglang" else find(name))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: fake.version if name == "sglang" else version(name))
    monkeypatch.delitem(sys.modules, "kvcached_client.sglang.storage", raising=False)
    return fake


def found() -> dict[str, str]:
    """Level by check; each finding that is not ok has a fix."""
    findings = list(sglang_findings())
    assert all(bool(finding.fix) == (finding.level != "ok") for finding in findings)
    return {finding.check: finding.level for finding in findings}


@pytest.mark.usefixtures("sglang")
def test_tested_version_passes() -> None:
    """The version that the tests run, its hooks and the storage are fine."""
    assert found() == {"sglang": "ok", "hooks": "ok", "storage backend": "ok"}


def test_other_version_is_a_warning(sglang: FakeSglang) -> None:
    """Another version that has what the hooks need may be used, and outputs are to be compared."""
    sglang.version = "0.6.0"
    assert found() == {"sglang": "warn", "hooks": "ok", "storage backend": "ok"}


def test_environment_without_sglang_is_told() -> None:
    """Where SGLang was asked about and is not, that is the only finding."""
    assert found() == {"sglang": "fail"}


@pytest.mark.usefixtures("sglang")
def test_version_that_lacks_what_the_hooks_need_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version whose tree takes other arguments would be refused when SGLang starts."""
    monkeypatch.setattr(UnifiedRadixCache, "prefetch_from_storage", lambda self, request: None)
    assert found() == {"sglang": "ok", "hooks": "fail"}


@pytest.mark.usefixtures("sglang")
def test_sglang_that_does_not_load_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the import of SGLang's modules ends with is a finding, and ends the checks of SGLang."""
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.hicache_storage", None)
    assert found() == {"sglang": "ok", "hooks": "ok", "storage backend": "fail"}

    def load(name: str) -> object:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(pkgutil, "resolve_name", load)
    assert found() == {"sglang": "ok", "hooks": "fail"}
