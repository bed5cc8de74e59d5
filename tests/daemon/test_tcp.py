"""A real daemon that other machines ask: the commands with keys, and what becomes of clients when it starts again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvcached.cli.options import ExitCode
from kvcached_client import Admin, DaemonUnreachable
from tests.daemon.conftest import CONFIG, started
from tests.project.daemon_process import clean_environment
from tests.project.source_tree import ROOT
from tests.rpc.test_tcp import free_port


def kvcached(*arguments: str | Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvcached", *map(str, arguments)]
    variables = {**clean_environment(), **(environment or {})}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)


def made_key(path: Path) -> str:
    made = kvcached("keys", "make", path)
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


class Remote(NamedTuple):
    """A daemon with a TCP port, its configuration, and how the commands find it."""

    directory: Path
    config: str
    endpoint: str
    server_key: str

    def arguments(self, key: str = "ops.key") -> list[str | Path]:
        """What names the daemon on a command line."""
        return ["--endpoint", self.endpoint, "--server-key", self.server_key, "--key-file", self.directory / key]

    def admin(self, key: str = "ops.key") -> Admin:
        """A connection by the SDK."""
        path = self.directory / key
        return Admin.connect(self.endpoint, server_key=self.server_key, key_file=path, deadline_ms=20_000)


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Remote]:
    """A daemon that lets two keys in."""
    server_key, port = made_key(tmp_path / "daemon.key"), free_port()
    keys = {name: made_key(tmp_path / f"{name}.key") for name in ("ops", "dashboard", "stranger")}
    config = f'{CONFIG}\n[tcp]\nlisten = "127.0.0.1:{port}"\nkey_file = "{tmp_path}/daemon.key"\n' + "".join(
        f'[[tcp.client]]\nname = "{name}"\npublic_key = "{keys[name]}"\nrole = "{role}"\n'
        for name, role in (("ops", "operate"), ("dashboard", "look"))
    )
    with started(tmp_path, config):
        yield Remote(tmp_path, config, f"tcp://127.0.0.1:{port}", server_key)


def test_commands_ask_a_daemon_on_another_machine(remote: Remote) -> None:
    """`--endpoint` before a command asks that daemon: reports for both roles, changes for operate alone."""
    looks = remote.arguments("dashboard.key")
    assert kvcached(*looks, "health").returncode == 0
    stats = json.loads(kvcached(*looks, "stats", "--json").stdout)
    assert stats["pools"][0]["replica"] == "default"
    assert kvcached(*looks, "top", "--samples", "2", "--interval-s", "0.1", "--json").returncode == 0

    refused = kvcached(*looks, "drain")
    assert refused.returncode == ExitCode.USAGE
    assert "needs the role operate, and key 'dashboard' has look" in refused.stderr
    variables = {"KVCACHED_ENDPOINT": remote.endpoint, "KVCACHED_SERVER_KEY": remote.server_key}
    variables["KVCACHED_KEY_FILE"] = str(remote.directory / "ops.key")
    assert kvcached("drain", environment=variables).returncode == 0
    assert "serving" in kvcached(*remote.arguments(), "resume").stdout

    strange = kvcached(*remote.arguments("stranger.key"), "health")
    assert strange.returncode == ExitCode.USAGE
    assert "does not know this client's public key" in strange.stderr
    with remote.admin() as admin:
        assert admin.stats().counters["tcp_unknown_keys"] == 1


def test_client_finds_the_next_daemon_at_the_same_port(tmp_path: Path, remote: Remote) -> None:
    """A connection of the SDK outlives its daemon: a call meanwhile fails, one after a restart is answered."""
    (directory := tmp_path / "other").mkdir()
    there = remote._replace(endpoint=f"tcp://127.0.0.1:{free_port()}")
    config = remote.config.replace(remote.endpoint.removeprefix("tcp://"), there.endpoint.removeprefix("tcp://"))
    with started(directory, config):
        admin = there.admin()
        epoch = admin.stats().daemon_epoch
    with admin:
        with pytest.raises(DaemonUnreachable):
            admin.stats()
        with started(directory, config):
            assert admin.stats().daemon_epoch != epoch
        with started(directory, config):  # nobody has called meanwhile
            assert admin.stats().daemon_epoch != epoch
