"""Engine processes for tests of loads. They speak in lines.

``hold RUN_DIR`` takes a lease for each line "NAME BLOCKS", and keeps it.

``shard GRANT`` is a shard process: for each line "TRANSFER PROGRESS LAYER DEADLINE_MS" it waits for that layer, and
says how that ended.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvcached_client import map_pool
from kvcached_client.errors import KvcachedError
from kvcached_client.protocol.engine import LoadTicket
from kvcached_client.transport.attach import SessionGrant
from tests.daemon.test_host_tier import Engine
from tests.line_process import say


def hold(run_dir: str) -> None:
    """Hold leases whose loads nobody waits for."""
    engine = Engine(Path(run_dir), shards=1)
    for line in sys.stdin:
        name, blocks = line.split()
        lease = engine.acquire(name, int(blocks))
        say(f"hit {lease.hit_blocks} of {len(lease.block_table)}, {'loading' if lease.is_loading else 'ready'}")


def wait_for_layers(grant: str) -> None:
    """Wait for what the lines name."""
    with map_pool(SessionGrant.from_bytes(bytes.fromhex(grant))) as pool:
        say("joined")
        for line in sys.stdin:
            transfer, progress, layer, deadline_ms = map(int, line.split())
            try:
                pool.wait_layer([LoadTicket(transfer, progress)], layer, deadline_ms=deadline_ms)
            except KvcachedError as error:
                say(type(error).__name__)
            else:
                say("there")


if __name__ == "__main__":
    {"hold": hold, "shard": wait_for_layers}[sys.argv[1]](*sys.argv[2:])
