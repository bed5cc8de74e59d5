"""`python -m tests.simulation --seed 7 --steps 5000`, or `--seeds 0:100` for many."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter

from tests.simulation.run import Result, run

_TRACE_DEFAULT = 60


def main(arguments: list[str] | None = None) -> int:
    """Run seeds; 1 if one of them fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="one seed")
    which.add_argument("--seeds", type=_range, help="many: FIRST:END, the end not included")
    parser.add_argument("--steps", type=int, default=5000, help="events with faults (default: 5000)")
    parser.add_argument(
        "--trace", type=int, nargs="?", const=_TRACE_DEFAULT, default=0, help="print the last so many events"
    )
    parser.add_argument("--reboots", action="store_true", help="the machine is restarted now and then")
    parser.add_argument("--sleeps", action="store_true", help="device pools are sent to sleep now and then")
    options = parser.parse_args(arguments)
    seeds = range(options.seed, options.seed + 1) if options.seed is not None else options.seeds
    results = []
    for seed in seeds:
        result = run(seed, options.steps, reboots=options.reboots, sleeps=options.sleeps)
        results.append(_Summary(result))
        told = [_line(result), *(result.history[-options.trace :] if options.trace else [])]
        if result.failure:
            told.append(result.report())
        sys.stderr.write("\n".join(told) + "\n")
    json.dump(_summary(results), sys.stdout, indent=2)
    sys.stdout.write("\n")
    return int(any(each.failed for each in results))


class _Summary:
    """What is kept of a result."""

    def __init__(self, result: Result) -> None:
        self.failed = bool(result.failure)
        self.reproduction = result.reproduction
        self.events, self.operations, self.virtual_ms = result.events, result.operations, result.virtual_ms
        self.seen = result.seen


def _line(result: Result) -> str:
    verdict = "FAILS" if result.failure else "holds"
    return (
        f"seed {result.seed}: {verdict}, {result.events} events in {result.virtual_ms / 1000:.1f} virtual s, "
        f"{result.operations} requests, history {result.digest}"
    )


def _summary(results: list[_Summary]) -> dict[str, object]:
    seen: Counter[str] = Counter()
    for result in results:
        seen += result.seen
    return {
        "seeds": len(results),
        "failed": [result.reproduction for result in results if result.failed],
        "events": sum(result.events for result in results),
        "requests": sum(result.operations for result in results),
        "virtual_s": sum(result.virtual_ms for result in results) // 1000,
        "seen": dict(sorted(seen.items())),
    }


def _range(text: str) -> range:
    first, end = text.split(":")
    return range(int(first), int(end))


if __name__ == "__main__":
    sys.exit(main())
