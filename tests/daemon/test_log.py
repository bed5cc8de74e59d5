"""The log of a real daemon: its level changes while it runs, and a request's story is in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.daemon.conftest import CONFIG
from tests.daemon.supervised import Supervised, supervised
from tests.daemon.test_host_tier import engine_on, tokens_of
from tests.project.daemon_process import clean_environment
from tests.project.source_tree import ROOT


def kvcached(daemon: Supervised, *arguments: str) -> str:
    """What the command prints."""
    command = [sys.executable, "-m", "kvcached", *arguments, "--run-dir", str(daemon.run_dir)]
    return subprocess.run(
        command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=60, check=True
    ).stdout


def entries(daemon: Supervised) -> list[dict[str, Any]]:
    return [json.loads(line) for line in daemon.log.splitlines() if line.startswith("{")]


def test_level_of_a_running_daemon_tells_the_story_of_a_lease(tmp_path: Path) -> None:
    """With `set-log-level debug`, the lines of one lease are found by its number, and end with `info` again."""
    with supervised(tmp_path, 'log_format = "json"\n' + CONFIG) as daemon, engine_on(daemon) as engine:
        assert kvcached(daemon, "set-log-level", "debug") == "log level: debug, was info\n"
        chain = engine.client.chain(tokens_of("a", 2))
        with engine.client.acquire("told", chain, full=True) as lease:
            engine.write(lease, "a")
            lease.commit(chain.token_count)
            number = lease.id
        assert kvcached(daemon, "set-log-level", "info") == "log level: info, was debug\n"
        with engine.client.acquire("untold", chain, full=True):
            pass

        told = entries(daemon)
        (first,) = [each for each in told if each.get("request") == "told"]
        story = [each for each in told if (each.get("session"), each.get("lease")) == (first["session"], number)]
        assert [each["verb"] for each in story] == ["acquire", "commit", "release"]
        assert not [each for each in told if each.get("request") == "untold"]
