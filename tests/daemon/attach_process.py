"""A process that attaches to a daemon, and joins a session whose grant it is given. It says how that went, in lines."""

from __future__ import annotations

import sys
from functools import partial

from kvcached_client import map_pool
from kvcached_client.transport.attach import SessionGrant, identify
from tests.line_process import outcome, say


def main() -> None:
    """Run until stdin ends."""
    run_dir, *grants = sys.argv[1:]
    say(outcome(partial(_identified, run_dir)))
    for grant in grants:
        say(outcome(partial(map_pool, SessionGrant.from_bytes(bytes.fromhex(grant)), 0, deadline_ms=5000)))
    sys.stdin.read()


def _identified(run_dir: str) -> str:
    identify(run_dir, client="test", deadline_ms=5000)
    return "identified"


if __name__ == "__main__":
    main()
