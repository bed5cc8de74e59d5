"""Real SGLang with more than one pool, and with more than one rank: each part is stored, and all parts make a hit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvcached_client import Admin
from tests.project.daemon_process import clean_environment
from tests.project.source_tree import ROOT
from tests.sglang.conftest import Prompts
from tests.sglang.sglang_process import HIERARCHICAL, PAGE_SIZE, SglangProcess, ended, interpreter
from tests.vllm.cache_daemon import CacheDaemon

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

WINDOW_PAGES = 2
#: On the CPU, SGLang 0.5.23 reads layers with a window at places of the other pool: what it computes depends on where
#: its allocator puts pages, so that outputs are compared only between processes that do the same from their start.
WITHOUT_STORAGE = {name: value for name, value in HIERARCHICAL.items() if "storage" not in name}
RANKS = 2


def namespaces(daemon: CacheDaemon, words: str) -> dict[str, str]:
    """Label by id of the namespaces with these words in their label."""
    return {host.namespace: host.label for host in daemon.stats().hosts if words in host.label}


def until_cached(daemon: CacheDaemon, words: str, *pages: int) -> None:
    """Wait until the namespaces with these words hold so many pages, the one with the fewest first."""
    daemon.until(
        lambda stats: (
            sorted(host.states["cached"] for host in stats.hosts if words in host.label) >= sorted(pages)
            and not any(stats.transfers.values())
        ),
        f"{pages} pages in {words}",
    )


def test_windows_are_found_with_the_rest(
    window_model: Path, daemon: CacheDaemon, prompt: Prompts, tmp_path: Path
) -> None:
    """A model with a pool for layers with a window finds its prompts where a window was stored, after SIGKILL, too."""
    tokens = prompt(8)
    with (
        ended(SglangProcess(tmp_path / "log", window_model, daemon.run_dir)) as sglang,
        ended(SglangProcess(tmp_path / "reference", window_model, None, **WITHOUT_STORAGE)) as reference,
    ):
        (alone,) = reference.wait_until_ready().complete(tokens)
        (cold,) = sglang.wait_until_ready().complete(tokens)
        until_cached(daemon, " swa", WINDOW_PAGES)
        sglang.forget()
        (warm,) = sglang.complete(tokens)
        sglang.stop()
        sglang.start()
        (again,) = sglang.wait_until_ready().complete(tokens)
        other = tokens[: 4 * PAGE_SIZE] + prompt(4, "other")
        sglang.forget()
        (shared,) = sglang.complete(other)
        reference.forget()
        assert [shared] == reference.complete(other)
    assert [cold, warm] == [alone] * 2
    assert [answer.found for answer in (cold, warm, again, shared)] == [0, 7 * PAGE_SIZE, 7 * PAGE_SIZE, 0]
    daemon.until_idle()


def test_ranks_store_their_parts_and_agree(model: Path, daemon: CacheDaemon, prompt: Prompts, tmp_path: Path) -> None:
    """Each of two ranks has a namespace and finds its part, after SIGKILL too; what one of them lacks, none uses."""
    tokens = prompt(8)
    with ended(SglangProcess(tmp_path / "log", model, daemon.run_dir, tp_size=RANKS)) as sglang:
        (cold,) = sglang.wait_until_ready().complete(tokens)
        until_cached(daemon, " tp2 rank ", *[8] * RANKS)
        sglang.forget()
        (warm,) = sglang.complete(tokens)
        sglang.stop()
        sglang.start()
        (again,) = sglang.wait_until_ready().complete(tokens)
        sglang.forget()
        _, second = sorted(namespaces(daemon, " tp2 rank "))
        with Admin.connect(daemon.run_dir) as admin:
            admin.clear(second)
        (without,) = sglang.complete(tokens)
    assert [warm, again, without] == [cold] * 3
    assert [answer.found for answer in (cold, warm, again, without)] == [0, 7 * PAGE_SIZE, 7 * PAGE_SIZE, 0]
    assert len(namespaces(daemon, " tp2 rank ")) == RANKS


def test_states_are_where_sglang_says(tmp_path: Path) -> None:
    """What SGLang writes as a page of its pool of states is, in the same order, what kvcached copies as that page."""
    command = [str(interpreter()), "-P", str(ROOT / "tests/sglang/own_pools.py")]
    environment = {**clean_environment(), "PYTHONPATH": str(ROOT / "tests/sglang/cpu")}
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
