"""A process in which SIGPIPE has its default effect, as in a program of C with Python inside."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from tests.client.fake_daemon import FakeDaemon
from tests.line_process import LineProcess

_MODULE = "tests.client.sigpipe_program"


@pytest.mark.parametrize("beats", ["with heartbeats", "without"])
def test_daemon_that_is_gone_does_not_kill_the_caller(daemon: FakeDaemon, beats: str) -> None:
    """Where the daemon is gone, the caller is told, also where SIGPIPE has its default effect; heartbeats end."""
    daemon.heartbeat_interval_ms = 20
    child = LineProcess(_MODULE, str(daemon.run_dir), str(beats == "with heartbeats"))
    try:
        assert child.hear() == "ready"
        assert beats == "without" or daemon.heartbeat_came.wait(20)
        daemon.stop()
        threading.Event().wait(0.2)  # for some heartbeats, which nobody reads
        assert child.ask("match").startswith("DaemonUnreachable")
        assert child.ask("close") == "done"
    finally:
        child.end()


def test_peer_that_is_gone_does_not_kill_who_leaves_it_or_sends_an_order() -> None:
    """A copy process or a daemon that ended is a failure, also where SIGPIPE has its default effect."""
    program = """
import contextlib, signal, socket
from kvcached_client.copy_process.messages import MessageStream, Ready
from kvcached_client.protocol.attach import Identify
from kvcached_client.transport import attach

signal.signal(signal.SIGPIPE, signal.SIG_DFL)
own, peer = socket.socketpair()
peer.close()
for action in (
    lambda: MessageStream(own).send(Ready(1), 1.0),
    lambda: attach._send(own, Identify()),
    attach.AttachConnection(own).leave,
):
    with contextlib.suppress(BrokenPipeError):
        action()
print("lives")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("lives\n", 0)
