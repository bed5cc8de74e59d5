"""A router as a program: follows the daemon in the run directory that it is given.

A line on stdin asks for its index, which it prints once it hears nothing more.
"""

from __future__ import annotations

import json
import select
import sys
from pathlib import Path

from tests.events.router import Router, Tier

QUIET_MS = 300


def main() -> None:
    """Follow, and answer."""
    router = Router.of(Path(sys.argv[1]))
    while True:
        router.take(20)
        if select.select([sys.stdin], [], [], 0)[0]:
            if not sys.stdin.readline():
                return
            while router.take(QUIET_MS) or router.last < 0:
                pass
            tiers = [(*tier, _told(router, tier, keys)) for tier, keys in router.solid().items()]
            sys.stdout.write(json.dumps([tiers, router.seen]) + "\n")
            sys.stdout.flush()
            router.seen.clear()


def _told(router: Router, tier: Tier, keys: set[bytes]) -> list[tuple[str, list[int]]]:
    """Blocks of a tier, and their tokens."""
    return [(key.hex(), router.tokens[tier, key]) for key in keys]


if __name__ == "__main__":
    main()
