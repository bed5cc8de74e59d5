"""Models with sliding windows, whose layers vLLM keeps in one group where the connector cannot tell them apart."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project.source_tree import ROOT
from tests.vllm.cache_daemon import CacheDaemon
from tests.vllm.completions import BLOCK_SIZE, random_tokens
from tests.vllm.server import VllmServer, ended, interpreter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

WINDOW = 2 * BLOCK_SIZE


@pytest.fixture
def windowed_model(tmp_path: Path) -> Path:
    """A tiny Gemma 3, with a window in every other layer."""
    folder = tmp_path / "windows"
    subprocess.run([interpreter(), ROOT / "tests/vllm/tiny_model.py", folder, "--window", str(WINDOW)], check=True)
    return folder / "model"


@pytest.fixture
def own_daemon(tmp_path: Path) -> Iterator[CacheDaemon]:
    """A daemon of its own."""
    daemon = CacheDaemon(tmp_path, slabs=8)
    daemon.start()
    yield daemon
    daemon.stop()


def test_model_with_windows_in_some_layers(tmp_path: Path, windowed_model: Path, own_daemon: CacheDaemon) -> None:
    """A model with sliding windows in some layers starts, answers as without kvcached, and hits after a restart."""
    prompt = random_tokens("windows", 6)
    with (
        ended(VllmServer(tmp_path, "plain", windowed_model, run_dir=None)) as plain,
        ended(VllmServer(tmp_path, "cached", windowed_model, run_dir=own_daemon.run_dir)) as cached,
    ):
        plain.wait_until_ready()
        cached.wait_until_ready()
        own_daemon.until_sessions(1)
        expected = plain.complete(prompt)
        assert cached.complete(prompt) == expected
        own_daemon.until_idle()

        cached.stop()
        cached.start()
        cached.wait_until_ready()
        own_daemon.until_sessions(1)
        again = cached.complete(prompt)

        assert again == expected
        assert again.cached_tokens == 5 * BLOCK_SIZE
        assert cached.metric("vllm:external_prefix_cache_hits_total") == 5 * BLOCK_SIZE
        for said in ("session", "no copies"):
            assert not [line for line in cached.log().splitlines() if "WARNING" in line and f"kvcached: {said}" in line]
