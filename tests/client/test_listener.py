from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvcached.cli.main import main
from kvcached_client import Admin, DaemonUnreachable, Refused
from kvcached_client.errors import DaemonSilent
from kvcached_client.transport.listener import connect

_LISTEN_AND_STOP = """
import os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as own:
    own.bind(sys.argv[1])
    own.listen()
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Path]:
    """A run directory in which this process listens, and never answers."""
    with socket.socket(socket.AF_UNIX) as own:
        own.bind(str(tmp_path / "rpc.sock"))
        own.listen()
        yield tmp_path


def test_another_users_daemon_is_told_at_once(listening: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks another user's daemon is told whose it is and how to ask, and does not wait for a deadline."""
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)

    with pytest.raises(
        Refused, match=rf"belongs to user \S+ \({user}\), but this process runs as user 12345"
    ) as caught:
        Admin.connect(listening, deadline_ms=3_600_000)

    assert f"sudo -u '#{user}'" in str(caught.value)


def test_command_on_another_users_daemon_is_wrong_usage(listening: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sudo kvcached health` ends with exit code 2 and says whose daemon it is."""
    monkeypatch.setattr(os, "geteuid", lambda: 12345)

    result = CliRunner().invoke(main, ["health", "--run-dir", str(listening)])

    assert (result.exit_code, "but this process runs as user 12345" in result.stderr) == (2, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may be somebody else")
def test_directory_that_may_not_be_entered_names_its_owner(listening: Path) -> None:
    """A user who may not reach the socket is told whose directory keeps it out."""
    os.seteuid(65534)
    try:
        with pytest.raises(Refused) as caught:
            connect(str(listening / "rpc.sock"), deadline_ms=1000)
    finally:
        os.seteuid(0)

    assert "belongs to user root (0), but this process runs as user nobody (65534)" in str(caught.value)


def test_a_process_that_listens_and_does_not_answer_is_told_apart_from_none(listening: Path) -> None:
    """Where somebody listens and takes no request, the error names the process, and does not ask whether it runs."""
    with Admin.connect(listening, deadline_ms=100) as admin, pytest.raises(DaemonSilent) as caught:
        admin.stats()

    assert f"process {os.getpid()} listens at {listening}/rpc.sock, but accepted no request for 100 ms" in str(
        caught.value
    )
    assert "it hangs" in str(caught.value)
    result = CliRunner().invoke(main, ["health", "--run-dir", str(listening), "--deadline-ms", "100"])
    assert (result.exit_code, "start it with" in result.stderr) == (4, False)


def test_a_stopped_process_is_called_stopped(tmp_path: Path) -> None:
    """A daemon under SIGSTOP is said to be stopped, with the command that continues it."""
    with subprocess.Popen([sys.executable, "-c", _LISTEN_AND_STOP, str(tmp_path / "rpc.sock")]) as process:
        try:
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            with (
                Admin.connect(tmp_path, deadline_ms=100) as admin,
                pytest.raises(DaemonSilent, match=f"it is stopped .* continue it with kill -CONT {process.pid}"),
            ):
                admin.stats()
        finally:
            process.send_signal(signal.SIGKILL)


def test_a_daemon_that_has_gone_meanwhile_is_not_running(tmp_path: Path) -> None:
    """Where nobody listens any more when the deadline has passed, the error says so."""
    own = socket.socket(socket.AF_UNIX)
    own.bind(str(tmp_path / "rpc.sock"))
    own.listen()
    with Admin.connect(tmp_path, deadline_ms=100) as admin:
        own.close()
        with pytest.raises(DaemonUnreachable, match="is the daemon running") as caught:
            admin.stats()

    assert not isinstance(caught.value, DaemonSilent)
