"""An engine process for tests: holds a lease, maps the pool, forks a child on request. It speaks in lines."""

from __future__ import annotations

import os
import select
import sys

from kvcached_client import Client, map_pool
from tests.line_process import outcome, say

BLOCKS = 4


def main() -> None:
    """Run until stdin ends. Prints what it did, a line per command."""
    client = Client.connect(sys.argv[1], deadline_ms=5000)
    pool = map_pool(client.session, 0)
    chain = client.chain(range(BLOCKS * client.layout.block_size))
    lease = client.acquire("held", chain)
    say(f"holds {len(lease.block_table)}")
    pages = pool.pages(0)
    for line in sys.stdin:
        match line.strip():
            case "write":
                pages[lease.block_table] = 7
                lease.commit(chain.token_count)
                say("written")
            case "rejoin":
                say(outcome(client.rejoin))
            case "fork":
                engine = os.pidfd_open(os.getpid())
                child = os.fork()
                if not child:
                    select.select([engine], [], [])  # until the engine is dead
                    pages[:] = 13
                    say("child wrote")
                    os._exit(0)
                say(f"child {child}")


if __name__ == "__main__":
    main()
