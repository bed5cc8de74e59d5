"""Workers that an earlier daemon left: found by what it wrote down of them, and ended where nobody adopts them.

Such a worker may still be copying into the host pool. So it is either adopted, which it answers when it copies nothing
any more, or it is killed, and the kernel's word is waited for that it is dead, before anything is granted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, TypeAlias

from kvcached.ledger import ProcessIdentity, identity_of, open_process
from kvcached.seqpacket import peer_credentials
from kvcached_client.rundir import socket_path
from kvcached_client.types import ShardIndex

#: Workers of a replica by their shards, as an earlier daemon wrote them down.
Adoptable: TypeAlias = Mapping[ShardIndex, ProcessIdentity]

#: How long a worker may take to finish what it copies and to answer. A stopped one never does, and holds up the start.
ADOPTION_DEADLINE_S: Final = 5.0
#: After SIGKILL only the kernel's own work is left, which is the freeing of the pool.
KILL_DEADLINE_S: Final = 5.0

_log: Final = logging.getLogger(__name__)


def worker_socket(run_dir: str, replica: str, shard: int) -> str:
    """Where a shard's worker listens.

    Raises:
        BadRequest: the path is longer than the kernel takes.
    """
    return socket_path(run_dir, f"worker-{replica}-{shard}.sock")


def remove_socket(path: str) -> None:
    """Remove what a worker listened at. Does nothing where there is no socket."""
    place = Path(path)
    if place.is_socket():
        place.unlink(missing_ok=True)


def open_adoptable(adoptable: Adoptable, shards: int) -> dict[ShardIndex, int] | None:
    """A pidfd of each shard's worker, the caller's to close; None where there is not exactly one for each, alive."""
    if sorted(adoptable) != list(range(shards)):
        return None
    with ExitStack() as opened:
        pidfds: dict[ShardIndex, int] = {}
        for shard, process in adoptable.items():
            pidfd = open_process(process.pid, process.started)
            if pidfd is None:
                return None
            opened.callback(os.close, pidfd)
            pidfds[shard] = pidfd
        opened.pop_all()
        return pidfds


def listening_workers(run_dir: str, replica: str, shards: int) -> Adoptable:
    """Workers that nobody wrote down: their daemon died before it could. Nothing is known of who writes their memory.

    Found by the sockets that they listen at, in a directory that only this user writes, by the kernel's word.
    """
    found = {}
    for shard in map(ShardIndex, range(shards)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as connection:
            try:
                connection.connect(worker_socket(run_dir, replica, shard))
            except OSError:  # mostly: nobody listens there
                continue
            credentials = peer_credentials(connection)
        process = identity_of(credentials.pid)
        if credentials.uid == os.geteuid() and credentials.pid != os.getpid() and process is not None:
            found[shard] = process
    return found


async def end_workers(run_dir: str, replica: str, adoptable: Adoptable) -> None:
    """Kill workers of an earlier daemon, and wait until the kernel says that all of them are dead.

    It waits as long as it takes: until then they may write into the host pool. Sockets of theirs are removed.
    """
    loop = asyncio.get_running_loop()
    deaths: dict[asyncio.Future[None], str] = {}
    with ExitStack() as opened:
        for shard, process in adoptable.items():
            pidfd = open_process(process.pid, process.started)
            if pidfd is not None:
                opened.callback(os.close, pidfd)
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                death = loop.create_future()
                loop.add_reader(pidfd, _set, death)
                opened.callback(loop.remove_reader, pidfd)
                deaths[death] = f"worker {replica}/{shard} (process {process.pid})"
        waiting = set(deaths)
        while waiting:
            _, waiting = await asyncio.wait(waiting, timeout=KILL_DEADLINE_S)
            for death in waiting:
                _log.error("%s did not end %g s after SIGKILL", deaths[death], KILL_DEADLINE_S)
    for shard in adoptable:
        remove_socket(worker_socket(run_dir, replica, shard))


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
