"""The command line of the supervisor, and a real daemon under it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import kvcached.recovery.supervise
from kvcached.cli.main import ExitCode, main
from kvcached.recovery.supervise import FAILED_STARTS_MAX, START_FAILED, WRONG_USAGE, Policy
from kvcached_client import Admin
from tests.project.daemon_process import clean_environment
from tests.project.source_tree import ROOT

CONFIG = str(ROOT / "configs/cpu-host.toml")
DEADLINE_S = 30


@pytest.mark.parametrize(
    ("given", "passed_on", "failed_starts_max", "keeper"),
    [
        (["--config", "x"], ["--config", "x"], FAILED_STARTS_MAX, ""),
        (["--config", "x", "--failed-starts-max", "3", "--run-dir", "r"], ["--config", "x", "--run-dir", "r"], 3, ""),
        (["--log-format", "json", "--log-level=debug"], ["--log-format", "json", "--log-level=debug"], 8, ""),
        (["--keeper", "/k/keeper.sock", "--config", "x"], ["--config", "x"], 8, "/k/keeper.sock"),
    ],
)
def test_cli_supervise_hands_its_arguments_on(
    given: list[str], passed_on: list[str], failed_starts_max: int, keeper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kvcached supervise` runs `serve` of the same program with what is not its own, and exits with its status.

    The check of the configuration at SIGHUP gets the same.
    """
    calls = []

    def fake(command: list[str], policy: Policy, keeper: str, check: list[str]) -> int:
        calls.append((command, policy, keeper, check))
        return 9

    monkeypatch.setattr(kvcached.recovery.supervise, "supervise", fake)

    assert CliRunner().invoke(main, ["supervise", *given]).exit_code == 9
    serve, check = ([sys.executable, "-P", "-m", "kvcached", name, *passed_on] for name in ("serve", "check-config"))
    assert calls == [(serve, Policy(failed_starts_max=failed_starts_max), keeper, check)]


@pytest.mark.parametrize("command", [["supervise", "--keeper", "", "--config", CONFIG], ["keep", "--socket", ""]])
def test_cli_refuses_a_keeper_without_a_path(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty path, as of a variable that is not set, is wrong usage: nobody waits for a keeper at it."""
    monkeypatch.setattr(kvcached.recovery.supervise, "supervise", lambda *_: 0)

    result = CliRunner().invoke(main, command)

    assert result.exit_code == ExitCode.USAGE
    assert "names no socket: give its path" in result.stderr


def test_cli_supervise_uses_the_exit_codes_of_the_command() -> None:
    """What the supervisor calls a failed start and wrong usage are the command's exit codes for them."""
    assert (START_FAILED, WRONG_USAGE) == (ExitCode.START_FAILED, ExitCode.USAGE)


def test_cli_supervise_with_a_wrong_configuration_exits_with_2(tmp_path: Path) -> None:
    """A configuration that is not there ends the supervisor at once, as it ends `serve`."""
    result = subprocess.run(
        [sys.executable, "-m", "kvcached", "supervise", "--config", str(tmp_path / "none.toml")],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )

    assert (result.returncode, result.stdout) == (ExitCode.USAGE, "")
    assert "none.toml" in result.stderr


def test_real_daemon_is_back_after_sigkill(tmp_path: Path) -> None:
    """A killed daemon is replaced by another one that answers; SIGTERM ends both with 0."""
    run_dir = tmp_path / "run"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices, (tmp_path / "log").open("w+") as log:
        notices.bind(str(tmp_path / "notify"))
        notices.settimeout(DEADLINE_S)
        with subprocess.Popen(
            [sys.executable, "-m", "kvcached", "supervise", "--config", CONFIG, "--run-dir", str(run_dir)],
            cwd=ROOT,
            env={**clean_environment(), "NOTIFY_SOCKET": str(tmp_path / "notify")},
            stderr=log,
        ) as supervisor:
            try:
                assert notices.recv(100) == b"READY=1"
                with Admin.connect(run_dir) as admin:
                    first = admin.describe().pid
                os.kill(first, signal.SIGKILL)
                assert notices.recv(100) == b"READY=1"
                with Admin.connect(run_dir) as admin:
                    assert admin.describe().pid != first
                supervisor.send_signal(signal.SIGTERM)

                assert notices.recv(100) == b"STOPPING=1"
                assert supervisor.wait(DEADLINE_S) == 0
            finally:
                supervisor.kill()
        log.seek(0)
        assert re.search(
            rf"daemon {first} started[\s\S]*ended by signal 9, Killed; the next one starts in 0\.1 s", log.read()
        )
