"""Who may reach the daemon."""

from __future__ import annotations

import stat

from tests.daemon.conftest import RunningDaemon


def test_every_socket_is_its_users_alone(daemon: RunningDaemon) -> None:
    """No socket of a running daemon, RPC, attach or a worker's, gives a permission to group or others."""
    modes = {path.name: path.stat().st_mode for path in daemon.run_dir.iterdir()}
    sockets = {name: mode for name, mode in modes.items() if stat.S_ISSOCK(mode)}

    assert len(sockets) >= 2
    assert [name for name, mode in sockets.items() if mode & 0o077] == []
