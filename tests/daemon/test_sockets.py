"""Who may reach the daemon."""

from __future__ import annotations

import socket
import stat

import pytest

from kvcached_client import Admin
from tests.daemon.conftest import RunningDaemon


def test_every_socket_is_its_users_alone(daemon: RunningDaemon) -> None:
    """No socket of a running daemon, RPC, attach or a worker's, gives a permission to group or others."""
    modes = {path.name: path.stat().st_mode for path in daemon.run_dir.iterdir()}
    sockets = {name: mode for name, mode in modes.items() if stat.S_ISSOCK(mode)}

    assert len(sockets) >= 2
    assert [name for name, mode in sockets.items() if mode & 0o077] == []


@pytest.mark.parametrize("name", ["rpc.sock", "attach.sock"])
def test_health_fails_when_a_socket_file_is_gone(daemon: RunningDaemon, name: str) -> None:
    """Nobody new finds the daemon then, though all who are connected are served: a cleaner of old files does that."""
    with Admin.connect(daemon.run_dir) as admin:
        assert admin.health().ok
        (daemon.run_dir / name).chmod(0o666)
        assert admin.health().ok
        (daemon.run_dir / name).unlink()
        report = admin.health()
        (part,) = [part for part in report.parts if not part.ok]
        assert (report.ok, part.part, str(daemon.run_dir / name) in part.detail) == (False, "sockets", True)
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(daemon.run_dir / name))
        assert not admin.health().ok
