"""A daemon leaves no garbage that only a full collection would find, so it does without: those take long."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from kvcached_client import Admin, Client, KvcachedError
from kvcached_client.offload import OffloadClient, OffloadLayout, new_instance
from tests.daemon.conftest import EngineProcess, RunningDaemon, started
from tests.daemon.garbage_daemon import GARBAGE
from tests.daemon.test_host_tier import HOST_CONFIG
from tests.rpc.raw_peer import RawPeer

PATIENCE_S = 20
BLOCKS = 6
LAYOUT = OffloadLayout(block_size=4, shards=1, block_bytes=1024, fingerprint=bytes(16))


def serve_managed(run_dir: Path) -> None:
    """Sessions of all ends, requests that are hits, misses and refusals."""
    with Client.connect(run_dir, deadline_ms=PATIENCE_S * 1000) as client:
        for number in (1, 2, 1, 3):
            chain = client.chain(range(number * 100, number * 100 + 4 * BLOCKS))
            with client.acquire(f"request-{number}", chain) as lease:
                if lease.is_loading:
                    lease.wait_loaded()
                lease.commit(chain.token_count)
        with pytest.raises(KvcachedError):
            client.acquire("too long", client.chain(range(4000)))
        with pytest.raises(KvcachedError):
            client.acquire("x" * 300, client.chain(range(4)))
    EngineProcess(run_dir).end()


def serve_offload(run_dir: Path) -> None:
    """A session that stores, cancels, hits, and ends."""
    with OffloadClient.connect(
        run_dir, engine="test", instance=new_instance(), keyspace=bytes(32), label="test", layout=LAYOUT,
        deadline_ms=PATIENCE_S * 1000,
    ) as client:  # fmt: skip
        keys = os.urandom(16 * BLOCKS)
        lease = client.acquire("request", keys, 4 * BLOCKS + 1).lease
        client.cancel_store(client.prepare_store(lease, 0, keys).transfer, "the test says so")
        client.release(lease)


def found_by_full_collection(daemon: RunningDaemon) -> dict[str, int]:
    """What only a full collection frees, by types."""
    place = daemon.run_dir.parent / GARBAGE
    place.unlink(missing_ok=True)
    daemon.process.send_signal(signal.SIGUSR2)
    end = time.monotonic() + PATIENCE_S
    with Admin.connect(daemon.run_dir, deadline_ms=PATIENCE_S * 1000) as admin:
        while not place.exists():
            assert time.monotonic() < end
            admin.stats()
    found: dict[str, int] = json.loads(place.read_text())
    return found


def test_sessions_and_requests_leave_no_cycles(tmp_path: Path) -> None:
    """Engines come, are served, are refused and die, and a full collection finds as little as before."""
    config = HOST_CONFIG + "[offload]\n"
    with started(tmp_path, config, program="tests.daemon.garbage_daemon") as daemon:
        for serve in (serve_managed, serve_offload):
            serve(daemon.run_dir)
        found_by_full_collection(daemon)  # what starting up and the first of each kind have left
        for _ in range(10):
            serve_managed(daemon.run_dir)
            serve_offload(daemon.run_dir)
            with RawPeer(daemon.run_dir / "rpc.sock") as peer:
                peer.send(b"no request")
                peer.receive()
        assert found_by_full_collection(daemon) == {}
