"""The command ``python -m benchmarks eviction``: recorded requests through the core alone, under each eviction policy.

One device pool without a host tier; a request's blocks are committed and given back before the next one comes. Block
hits of a trace are counts, not times: they are the same on each machine.
"""

from __future__ import annotations

import argparse
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.replay_trace import TRACE, Recorded, read_trace
from benchmarks.result import Result, judge
from kvcached.core.cache import Cache
from kvcached.core.eviction.by_priority import POLICIES
from kvcached.core.index.run import KEY_SIZE
from kvcached.core.namespaces import PoolSpec
from kvcached.core.refusals import Refusal
from kvcached_client.types import NO_FENCE

NAME: Final = "eviction"
#: Sizes of the pool, in percent of the trace's different blocks.
CAPACITIES_PERCENT: Final = (0.3, 1.0, 3.0, 10.0)
_POOL: Final = "pool"


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says; see its help."""

    trace: Path
    json: bool


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line, after its name."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {NAME}", description="Block hits of recorded requests under each eviction policy."
    )
    parser.add_argument("trace", nargs="?", type=Path, default=TRACE, help="JSON lines, gzipped; default: the one here")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    options = parser.parse_args(arguments)
    return Options(options.trace, options.json)


def run(options: Options) -> Iterator[Result]:
    """Block hit rates; the floor is that of lru in a pool of the same size."""
    requests = read_trace(options.trace)
    different = len({block for request in requests for block in request.full_ids})
    for percent in CAPACITIES_PERCENT:
        slots = int(different * percent / 100)
        lru = hit_percent(requests, "lru", slots)
        yield judge(NAME, f"lru, pool of {percent:g} %", lru, "% of blocks")
        for policy in POLICIES.keys() - {"lru"}:
            hits = hit_percent(requests, policy, slots)
            yield judge(NAME, f"{policy}, pool of {percent:g} %", hits, "% of blocks", floor=lru)


def hit_percent(requests: Sequence[Recorded], policy: str, slots: int) -> float:
    """Which share of all full blocks is hit in a pool of so many slots."""
    spec = PoolSpec(_POOL, b"trace", 1, slots, eviction_policy=policy)
    cache = Cache([spec], epoch=1, session_ttl_ms=1)
    session = cache.open_session(_POOL, 0)
    hits = blocks = 0
    for number, request in enumerate(requests):
        keys = b"".join(block.to_bytes(KEY_SIZE, "big") for block in request.full_ids)
        count = len(request.full_ids)
        blocks += count
        try:
            grant = cache.managed.acquire(session.id, 1, str(number), keys, count, 0, full=True)
        except Refusal:
            continue  # longer than the pool: computed, and not kept
        hits += grant.hit
        rest = keys[grant.hit * KEY_SIZE :]
        cache.managed.finish(session.id, 1, grant.lease, grant.hit, rest, array("i", grant.ranges), NO_FENCE)
        cache.settle()
    return 100 * hits / blocks
