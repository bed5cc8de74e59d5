from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvcached.cli.main import main
from kvcached_client import Admin, DaemonUnreachable, Refused
from kvcached_client.errors import DaemonSilent
from kvcached_client.transport import listener as listener_module
from kvcached_client.transport.listener import Listener, connect

#: A user who is neither root nor the one that runs this.
OTHER = 54_321
LISTEN_AND_STOP = """
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


def is_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever listens is another user by the kernel's word, as if it had made a directory in /tmp first."""
    monkeypatch.setattr(listener_module, "listener_of", lambda _: Listener(1, OTHER))


def test_daemon_that_anybody_may_have_started_is_told_at_once(listening: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon of another user in a directory of anybody's is not asked; whose it is, is said at once."""
    is_anothers(monkeypatch)

    with pytest.raises(
        Refused, match=rf"belongs to user {OTHER}, but this process runs as .*anybody may have put it there"
    ) as caught:
        Admin.connect(listening, deadline_ms=3_600_000)

    assert f"sudo -u '#{OTHER}'" in str(caught.value)


def test_command_on_a_strangers_daemon_is_wrong_usage(listening: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sudo kvcached health` in a directory of anybody's ends with exit code 2 and says whose daemon it is."""
    is_anothers(monkeypatch)

    result = CliRunner().invoke(main, ["health", "--run-dir", str(listening)])

    assert (result.exit_code, f"belongs to user {OTHER}" in result.stderr) == (2, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
@pytest.mark.parametrize(
    ("owner", "mode", "parent_mode", "is_trusted"),
    [
        (OTHER, 0o750, 0o755, True),
        (OTHER + 1, 0o750, 0o755, False),
        (OTHER, 0o770, 0o755, False),
        (OTHER, 0o750, 0o1777, False),
    ],
    ids=["given by root", "not the listener's", "writable by a group", "where anybody makes directories"],
)
def test_owner_of_a_directory_that_root_has_given_is_trusted(
    monkeypatch: pytest.MonkeyPatch, owner: int, mode: int, parent_mode: int, *, is_trusted: bool
) -> None:
    """The owner of a run directory that no other user can have put in its place is trusted; root need not own it."""
    with tempfile.TemporaryDirectory(dir="/run") as parent, socket.socket(socket.AF_UNIX) as own:
        run_dir = Path(parent) / "kvcached"
        run_dir.mkdir()
        own.bind(str(run_dir / "rpc.sock"))
        own.listen()
        os.chown(run_dir, owner, -1)
        run_dir.chmod(mode)
        Path(parent).chmod(parent_mode)
        is_anothers(monkeypatch)

        if is_trusted:
            connect(str(run_dir / "rpc.sock"), deadline_ms=1000).close()
        else:
            with pytest.raises(Refused, match="anybody may have put it there"):
                connect(str(run_dir / "rpc.sock"), deadline_ms=1000)


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
    assert "run this as that user: sudo -u root …" in str(caught.value)


def test_a_process_that_listens_and_does_not_answer_is_told_apart_from_none(listening: Path) -> None:
    """Where somebody listens and takes no request, the error names the process, and does not ask whether it runs."""
    with Admin.connect(listening, deadline_ms=100) as admin, pytest.raises(DaemonSilent) as caught:
        admin.stats()

    assert f"process {os.getpid()} listens at {listening}/rpc.sock, but accepted no request for 100 ms" in str(
        caught.value
    )
    assert "it hangs" in str(caught.value)
    result = CliRunner().invoke(main, ["health", "--run-dir", str(listening), "--deadline-ms", "100"])
    assert (result.exit_code, "start the daemon" in result.stderr) == (4, False)


def test_a_stopped_process_is_called_stopped(tmp_path: Path) -> None:
    """A daemon under SIGSTOP is said to be stopped, with the command that continues it."""
    with subprocess.Popen([sys.executable, "-c", LISTEN_AND_STOP, str(tmp_path / "rpc.sock")]) as process:
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
        with pytest.raises(DaemonUnreachable, match=r"start the daemon \(kvcached supervise") as caught:
            admin.stats()

    assert not isinstance(caught.value, DaemonSilent)
