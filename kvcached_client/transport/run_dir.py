"""Where a daemon is: the directory of its sockets, which it and its clients find by the same rule, or host and port."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from kvcached_client.errors import bad_value

RUN_DIR_VARIABLE: Final = "KVCACHED_RUN_DIR"
ATTACH_SOCKET_NAME: Final = "attach.sock"
RPC_SOCKET_NAME: Final = "rpc.sock"
#: Of KV cache events, unless the configuration puts them elsewhere.
EVENTS_SOCKET_NAME: Final = "events.sock"
REPLAY_SOCKET_NAME: Final = "replay.sock"
#: Locked by the daemon that uses the directory.
LOCK_NAME: Final = "daemon.lock"
#: sizeof(sockaddr_un.sun_path) on Linux is 108, the closing zero included.
SOCKET_PATH_BYTES_MAX: Final = 107


def default_run_dir() -> Path:
    """The run directory that the environment names.

    ``$KVCACHED_RUN_DIR``, else the first entry of ``$RUNTIME_DIRECTORY`` (set by systemd), else
    ``$XDG_RUNTIME_DIR/kvcached``, else ``/tmp/kvcached-<uid>``. An empty variable counts as unset.
    """
    if named := os.environ.get(RUN_DIR_VARIABLE):
        return Path(named)
    if runtime := os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0]:
        return Path(runtime)
    if session := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(session) / "kvcached"
    return Path(f"/tmp/kvcached-{os.getuid()}")  # noqa: S108 - the attach socket proves who its peer is


def socket_path(run_dir: str | os.PathLike[str], name: str) -> str:
    """The path of a socket in a run directory.

    Raises:
        BadRequest: the path is longer than the kernel's 107 bytes.
    """
    path = str(Path(run_dir) / name)
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_BYTES_MAX:
        raise bad_value(
            f"socket path {path} is {size} bytes long, at most {SOCKET_PATH_BYTES_MAX} are possible",
            f"name a shorter run directory in {RUN_DIR_VARIABLE}",
        )
    return path


def rpc_endpoint(run_dir: str | os.PathLike[str]) -> str:
    """The ZeroMQ endpoint of the daemon in a run directory.

    Raises:
        BadRequest: see `socket_path`.
    """
    return f"ipc://{socket_path(run_dir, RPC_SOCKET_NAME)}"


def host_and_port(endpoint: str) -> tuple[str, int] | None:
    """What ``tcp://HOST:PORT`` names; None where it is something else, or a host that no resolver takes."""
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")  # as a connection does it
    except ValueError:
        return None
    return (host, port) if host and port and endpoint == f"tcp://{parts.netloc}" else None
