"""SIGHUP to the supervisor while its configuration is wrong."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvcached.recovery.run_dir import claim_run_dir
from kvcached.recovery.supervise import RESTART_VARIABLE
from kvcached_client import Admin
from tests.project.daemon_process import clean_environment
from tests.project.source_tree import ROOT
from tests.recovery.fake_daemon import STOPPED_STATUS
from tests.recovery.test_cli_supervise import CONFIG, DEADLINE_S
from tests.recovery.test_supervise import supervised  # noqa: F401 - a fixture


def test_daemon_is_not_stopped_for_a_configuration_that_is_wrong(
    tmp_path: Path,
    supervised: Callable[..., Any],  # noqa: F811 - the fixture
) -> None:
    """SIGHUP leaves the daemon alone, with one line that says why, until its check passes; then it restarts it."""
    file = tmp_path / "configuration"
    with supervised(check=["cat", str(file)]) as it:
        first = it.ready()
        it.send(signal.SIGHUP)
        it.logged(r"ERROR .*SIGHUP: the daemon goes on and is not restarted: cat: .*configuration'?: No such file")
        file.touch()
        it.send(signal.SIGHUP)

        assert it.event() == {"event": "stopping", "pid": first["pid"], "signal": "SIGTERM"}
        assert it.ready()["before"] == [str(first["pid"])]


def test_check_is_told_that_the_daemon_is_to_be_restarted(
    supervised: Callable[..., Any],  # noqa: F811 - the fixture
) -> None:
    """The check knows that memory which the daemon has is the next one's; the daemon's environment is as before."""
    with supervised(check=["printenv", RESTART_VARIABLE]) as it:
        first = it.ready()
        it.send(signal.SIGHUP)
        assert it.event()["event"] == "stopping"
        second = it.ready()
        environment = Path(f"/proc/{second['pid']}/environ").read_bytes()
    assert second["before"] == [str(first["pid"])]
    assert RESTART_VARIABLE.encode() not in environment


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        (["sleep", "60"], r"the check of the configuration was killed, as after 0\.3 s"),
        (["/no/check"], r"the configuration cannot be checked: .*'/no/check'"),
        (["false"], r"its check ended with status 1"),
    ],
    ids=["hangs", "is missing", "is silent"],
)
def test_check_that_fails_is_no_reason_to_stop_the_daemon(
    check: list[str],
    reason: str,
    supervised: Callable[..., Any],  # noqa: F811 - the fixture
) -> None:
    """Without an answer the daemon is not restarted, either; further SIGHUP meanwhile do nothing."""
    with supervised(check=check, check_max_s=0.3) as it:
        first = it.ready()
        it.send(signal.SIGHUP)
        it.send(signal.SIGHUP)
        it.logged(f"SIGHUP: the daemon goes on and is not restarted: {reason}")

        os.kill(first["pid"], signal.SIGKILL)
        assert it.ready()["before"] == [str(first["pid"])]


#: The first look lasts until the test goes on, and finds what a daemon of the same supervisor has made meanwhile.
LATE_LOOK = 'test -e "$0" && exit; kill -9 $CHECKED_BEFORE_RESTART; until test -e "$0"; do sleep 0.05; done; exit 2'


def test_check_of_a_daemon_that_has_died_meanwhile_is_repeated(
    tmp_path: Path,
    supervised: Callable[..., Any],  # noqa: F811 - the fixture
) -> None:
    """What a check finds says nothing of the daemon that was started while it ran: that one is checked, too."""
    go_on = tmp_path / "go on"
    with supervised(check=["sh", "-c", LATE_LOOK, str(go_on)]) as it:
        first = it.ready()
        it.send(signal.SIGHUP)
        second = it.ready()
        assert second["before"] == [str(first["pid"])]
        go_on.touch()

        assert it.event() == {"event": "stopping", "pid": second["pid"], "signal": "SIGTERM"}
        assert it.ready()["before"] == [str(first["pid"]), str(second["pid"])]


def test_stop_does_not_wait_for_the_check(supervised: Callable[..., Any]) -> None:  # noqa: F811 - the fixture
    """SIGTERM ends daemon and supervisor while the configuration is looked at."""
    with supervised(check=["sleep", "60"]) as it:
        it.ready()
        it.send(signal.SIGHUP)
        it.send(signal.SIGTERM)

        assert it.status() == STOPPED_STATUS


class RealSupervisor(NamedTuple):
    """`kvcached supervise`, whose daemon is ready.

    Attributes:
        send_hangup: sends SIGHUP.
        refusal: waits for the line that says why SIGHUP was refused.
        ready: waits for the daemon that is started next.
        daemon: the process of the one that serves.
    """

    send_hangup: Callable[[], None]
    refusal: Callable[[], str]
    ready: Callable[[], None]
    daemon: Callable[[], int]


@contextmanager
def real_supervisor(tmp_path: Path, config: Path, *prefix: str) -> Iterator[RealSupervisor]:
    """The supervisor of a real daemon; `prefix` is a command that becomes it."""
    program = [*prefix, sys.executable, "-m", "kvcached", "supervise"]
    variables = {**clean_environment(), "NOTIFY_SOCKET": str(tmp_path / "notify"), "KVCACHED_RUN_DIR": ""}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
        notices.bind(str(tmp_path / "notify"))
        notices.settimeout(DEADLINE_S)
        with subprocess.Popen(
            [*program, "--config", str(config)], cwd=ROOT, env=variables, stderr=subprocess.PIPE, text=True
        ) as supervisor:
            lines = supervisor.stderr
            assert lines is not None

            def ready() -> None:
                assert notices.recv(100) == b"READY=1"

            def daemon() -> int:
                with Admin.connect(tmp_path / "run") as admin:
                    return admin.describe().pid

            try:
                ready()
                yield RealSupervisor(
                    lambda: supervisor.send_signal(signal.SIGHUP),
                    lambda: next(line for line in lines if "SIGHUP" in line),
                    ready,
                    daemon,
                )
            finally:
                supervisor.kill()


def good(tmp_path: Path) -> str:
    return f'run_dir = "{tmp_path}/run"\n{Path(CONFIG).read_text()}'


def test_real_daemon_is_not_stopped_for_a_configuration_that_is_wrong(tmp_path: Path) -> None:
    """SIGHUP with a broken file leaves the daemon as it is, with one line; with the mended file it is restarted."""
    config = tmp_path / "kvcached.toml"
    config.write_text(good(tmp_path))
    with real_supervisor(tmp_path, config) as it:
        before = it.daemon()
        config.write_text("log_levle = 'info'\nsession_ttl_ms = 5\n" + good(tmp_path))
        it.send_hangup()
        refused = it.refusal()
        assert f"the daemon goes on and is not restarted: {config}:2: session_ttl_ms = 5: is too small" in refused
        assert refused.endswith("(and 1 more). Mend that, and send SIGHUP again\n")
        assert it.daemon() == before

        config.write_text(good(tmp_path))
        it.send_hangup()
        it.ready()
        assert it.daemon() != before


def test_real_daemon_is_not_stopped_for_what_the_next_start_would_end_for(tmp_path: Path) -> None:
    """A limit that is too low for more shards, and a run directory that is not its alone, are no failed starts."""
    config, other = tmp_path / "kvcached.toml", tmp_path / "other"
    config.write_text(good(tmp_path))
    other.mkdir(mode=0o750)
    with real_supervisor(tmp_path, config, "prlimit", "--nofile=400:400") as it:
        before = it.daemon()
        _, held = claim_run_dir(other)
        for changed, reason in (
            (good(tmp_path).replace("[[replica]]\n", "[[replica]]\nshards = 8\n"), "the limit of open files is 400"),
            (good(tmp_path).replace(f"{tmp_path}/run", str(other)), f"another daemon runs in {other}"),
        ):
            assert changed != good(tmp_path)
            config.write_text(changed)
            it.send_hangup()
            refused = it.refusal()
            assert "the daemon goes on and is not restarted: " in refused
            assert reason in refused
            assert it.daemon() == before
        held.__exit__(None, None, None)
        other.chmod(0o770)
        it.send_hangup()
        assert f"others may write into {other}" in it.refusal()
        assert it.daemon() == before
