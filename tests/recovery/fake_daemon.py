"""A daemon in one file: keeps a memory across its deaths, tells a test what happens, and behaves as it is told.

``python -m tests.recovery.fake_daemon <socket of the test> [<behaviour>...]``. Each line that it says is a JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

from kvcached.process.notify import READY, STOPPING, notify
from kvcached.recovery.fd_store import VARIABLES, remove, store, take_stored

STOPPED_STATUS = 7
UNREADY_STATUS = 5
#: As many shards as a soft limit of open files lets nobody have.
PARTS = 100


def main(address: str, behaviours: set[str]) -> None:
    """Start, say so, then do what signals ask for."""
    stored = take_stored()
    pool = stored["pool"][0] if "pool" in stored else new_pool(PARTS if "large" in behaviours else 0)
    teller = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    teller.connect(address)
    before = os.pread(pool, 1000, 0).decode()
    os.pwrite(pool, f"{before}{os.getpid()} ".encode(), 0)

    def tell(event: str, **more: object) -> None:
        teller.send(json.dumps({"event": event, "pid": os.getpid(), **more}).encode())

    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    orphan = 0
    if "orphan" in behaviours and not before:
        orphan = subprocess.Popen(["/bin/sleep", "60"]).pid
    tell(
        "started",
        before=before.split(),
        names={name: len(descriptors) for name, descriptors in stored.items()},
        left=[name for name in VARIABLES if name in os.environ],
        notify=os.environ["NOTIFY_SOCKET"],
        group=os.getpgid(0),
        orphan=orphan,
    )
    if "unready" in behaviours:
        sys.exit(UNREADY_STATUS)
    if "usage" in behaviours:
        sys.exit(2)
    if "stuck" in behaviours and not before:
        signal.sigwait(signals)
    if "starting" in behaviours and not before:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        signal.pause()
    if "forgetful" in behaviours:
        remove("pool")
    notify(READY)
    if "container" in behaviours:
        os.kill(1 if before else os.getpid(), signal.SIGTERM if before else signal.SIGKILL)
    wait_for_the_end(signals, tell, stubborn="stubborn" in behaviours)


def new_pool(parts: int) -> int:
    """Make a memory and so many more, which are kept from now on."""
    store("pool", pool := os.memfd_create("pool"))
    for number in range(parts):
        store("part", os.memfd_create(f"part {number}"))
    return pool


def wait_for_the_end(signals: set[signal.Signals], tell: object, *, stubborn: bool) -> None:
    """Stop at the first signal, or, being stubborn, at the second."""
    assert callable(tell)
    first = signal.Signals(signal.sigwait(signals))
    if first != signal.SIGUSR1:
        notify(STOPPING)
    tell("stopping", signal=first.name)
    if stubborn:
        tell("stopping", signal=signal.Signals(signal.sigwait(signals)).name)
    sys.exit(STOPPED_STATUS)


if __name__ == "__main__":
    main(sys.argv[1], set(sys.argv[2:]))
