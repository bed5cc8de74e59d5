"""Files of peers: the daemon takes none, because to close one may take as long as the peer likes."""

from __future__ import annotations

import array
import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcached.server import listener
from kvcached_client import Admin
from tests.daemon.conftest import RunningDaemon, started
from tests.daemon.offload_process import DEADLINE_MS
from tests.daemon.test_offload import config as offload_config
from tests.daemon.test_restart import Engine

LINGER_S = 3


def has_option() -> bool:
    """Whether this kernel can refuse descriptors."""
    with socket.socket(socket.AF_UNIX) as trial, contextlib.suppress(OSError):
        trial.setsockopt(socket.SOL_SOCKET, listener._SO_PASSRIGHTS, 0)
        return True
    return False


pytestmark = pytest.mark.skipif(not has_option(), reason="this kernel knows no SO_PASSRIGHTS")


@contextlib.contextmanager
def lingering_socket() -> Iterator[int]:
    """A socket whose last close waits: it has sent what nobody reads."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
        with receiver, sender:
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_S))
            sender.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    sender.send(bytes(1 << 16))
            yield sender.fileno()
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))


@pytest.mark.parametrize(
    ("name", "kind"), [("attach.sock", socket.SOCK_SEQPACKET), ("rpc.sock", socket.SOCK_STREAM)], ids=["attach", "rpc"]
)
def test_daemon_takes_no_file_of_a_peer(tmp_path: Path, name: str, kind: socket.SocketKind) -> None:
    """A socket that lingers when it is closed delays nobody: the kernel refuses to pass it on. Engines go on."""
    with started(tmp_path, offload_config()) as daemon, contextlib.ExitStack() as parts:
        engine = Engine(daemon.run_dir)
        parts.callback(engine.close)
        descriptor = parts.enter_context(lingering_socket())
        peer = parts.enter_context(socket.socket(socket.AF_UNIX, kind))
        peer.connect(str(daemon.run_dir / name))
        with pytest.raises(PermissionError):
            peer.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])
        assert worst_wait_s(daemon) < LINGER_S / 2
        engine.store("a", 3)
        assert engine.load("a", 3) == 3


def worst_wait_s(daemon: RunningDaemon) -> float:
    """Of a few requests."""
    waits = []
    with Admin.connect(daemon.run_dir, deadline_ms=DEADLINE_MS) as admin:
        for _ in range(20):
            began_s = time.monotonic()
            admin.stats()
            waits.append(time.monotonic() - began_s)
    return max(waits)
