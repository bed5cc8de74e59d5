"""docs/upgrade.md, walked: its commands before and after an upgrade of a supervised daemon."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from kvcached.cli.main import ExitCode
from tests.daemon.supervised import supervised
from tests.daemon.test_host_tier import HOST_CONFIG, engine_on, wait_stored, wait_until
from tests.daemon.test_restart import Engine
from tests.project.daemon_process import clean_environment
from tests.project.source_tree import ROOT

TEXT = (ROOT / "docs/upgrade.md").read_text()
TIMEOUT_S = 60


def run_commands(section: str, config: Path, run_dir: Path) -> list[str]:
    """Run the commands of a section where the daemon of the test is; returns their names."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## )", TEXT, re.DOTALL | re.MULTILINE)
    places = {"/etc/kvcached/kvcached.toml": str(config), "/run/kvcached": str(run_dir)}
    names = []
    for line in re.findall(r"^ {4,}(kvcached .*)$", text, re.MULTILINE):
        arguments = [places.get(word, word) for word in shlex.split(line)[1:]]
        command = [sys.executable, "-m", "kvcached", *arguments]
        subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, timeout=TIMEOUT_S, check=True)
        names.append(arguments[0])
    return names


def test_documented_upgrade_keeps_every_block(tmp_path: Path) -> None:
    """The commands before and after work, SIGHUP to the supervisor starts the new daemon, and its log says so."""
    with supervised(tmp_path, HOST_CONFIG) as daemon:
        with engine_on(daemon) as engine:
            engine.compute("a", 4)
            wait_stored(daemon.run_dir, 4)
        assert run_commands("Before", tmp_path / "kvcached.toml", daemon.run_dir) == ["check-config", "stats"]
        before = daemon.daemon_pid
        daemon.process.send_signal(signal.SIGHUP)
        daemon.await_ready()

        assert run_commands("After", tmp_path / "kvcached.toml", daemon.run_dir) == ["health", "version", "stats"]
        assert daemon.daemon_pid != before
        with engine_on(daemon) as engine, engine.acquire("a", 4) as lease:
            assert lease.hit_blocks == 4
        (documented,) = re.findall(r"`(taken over in .*?)`", TEXT)
        assert re.search(documented.replace("…", r"\d+"), daemon.log)


OTHER_NAMESPACE = "its namespace is another one now"
#: By each change of the configuration: what the log of the next start must say.
COLD = {
    ('model = "tiny"', 'model = "other"'): (
        f"the blocks of replica default in the host pool are lost: {OTHER_NAMESPACE}",
        f"the blocks of replica default in its device pool are lost: {OTHER_NAMESPACE}",
    ),
    ("slots = 16", "slots = 24"): (
        "the device pool of replica default that was kept cannot be used, and its blocks are lost: it has 16 slots",
    ),
    ('name = "default"', 'name = "renamed"'): (
        "the blocks of replica default in the host pool are lost: no replica of this name is configured",
        "the device pool of replica default that was kept cannot be used, and its blocks are lost: no replica",
    ),
}


def test_each_loss_to_a_changed_configuration_is_told(tmp_path: Path) -> None:
    """A start that loses blocks because the configuration has changed says of which replica and why, once."""
    text = HOST_CONFIG
    with supervised(tmp_path, text) as daemon:
        for number, ((before, after), lines) in enumerate(COLD.items()):
            with engine_on(daemon) as engine:
                engine.compute(f"prompt {number}", 4)
                wait_until(daemon.run_dir, lambda stats: stats.counters.get("stored_blocks", 0) >= 4)
            text = text.replace(before, after)
            (tmp_path / "kvcached.toml").write_text(text)
            known = daemon.log
            daemon.process.send_signal(signal.SIGHUP)
            daemon.await_ready()
            said = daemon.log.removeprefix(known)
            assert [said.count(line) for line in lines] == [1] * len(lines), said
            assert len(re.findall(" lost: ", said)) == len(lines), said


def test_loss_of_offload_mode_is_told(tmp_path: Path) -> None:
    """A configuration without [offload] loses the blocks of its engines, and the log says so."""
    with supervised(tmp_path, HOST_CONFIG + "[offload]\n") as daemon:
        engine = Engine(daemon.run_dir)
        engine.store("a", 4)
        engine.close()
        (tmp_path / "kvcached.toml").write_text(HOST_CONFIG)
        daemon.process.send_signal(signal.SIGHUP)
        daemon.await_ready()
        assert "1 namespaces of engines in offload mode are dropped, and their blocks are lost: [off" in daemon.log


def test_second_daemon_in_a_run_directory_says_so(tmp_path: Path) -> None:
    """While a daemon runs, another one does not start beside it: the exit code is the documented one."""
    with supervised(tmp_path, HOST_CONFIG) as daemon:
        options = ["--config", str(tmp_path / "kvcached.toml"), "--run-dir", str(daemon.run_dir)]
        result = subprocess.run(
            [sys.executable, "-m", "kvcached", "serve", *options],
            cwd=ROOT,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    assert result.returncode == ExitCode.START_FAILED
    assert "another daemon runs in" in result.stderr
