"""Which seeds to name in the tests, after a change of the product has given every seed another history.

`python -m tests.simulation.choose_seeds cover 0:200` says which seeds together show all that is expected, and
`python -m tests.simulation.choose_seeds mistakes 0:100 "quarantine skipped"` which ones find a mistake.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence

from tests.simulation.mistake import Mistake
from tests.simulation.mistakes import MISTAKES
from tests.simulation.run import run
from tests.simulation.test_simulation import EXPECTED, EXPECTED_OF_LIVES, MORE_SEEDS, SEEDS, STEPS, VERBS

#: Seeds that find a mistake are named two by two: one may lose it with the next change.
_FINDERS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Search; 1 if a seed fails without a mistake, or something is shown by no seed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.choose_seeds", description=__doc__)
    parser.add_argument("what", choices=("check", "cover", "mistakes"), help="check: are the seeds named today enough?")
    parser.add_argument("seeds", type=_range, nargs="?", default=range(100), help="FIRST:END (default: 0:100)")
    parser.add_argument("names", nargs="*", help="of mistakes (default: those that no seed named today finds)")
    parser.add_argument("--reboots", action="store_true", help="cover: with a machine that is restarted now and then")
    options = parser.parse_args(arguments)
    if options.what == "cover":
        return _cover(options.seeds, reboots=options.reboots)
    if options.names:
        chosen = [mistake for mistake in MISTAKES if mistake.name in options.names]
    else:
        chosen = [mistake for mistake in MISTAKES if not _finders(mistake, mistake.seeds, 1)]
    if options.what == "check":
        _say(f"found by no named seed: {[mistake.name for mistake in chosen]}")
        return _check_cover() or int(bool(chosen))
    return max((_search(mistake, options.seeds) for mistake in chosen), default=0)


def _search(mistake: Mistake, seeds: Iterable[int]) -> int:
    found = _finders(mistake, seeds, _FINDERS)
    _say(f"{mistake.name}: {tuple(found)}")
    return int(not found)


def _finders(mistake: Mistake, seeds: Iterable[int], count: int) -> list[int]:
    """The first so many seeds that find a mistake."""
    found: list[int] = []
    for seed in seeds:
        with mistake.made():
            failed = bool(run(seed, STEPS, reboots=mistake.reboots, sleeps=mistake.sleeps).failure)
        found += [seed] if failed else []
        if len(found) == count:
            break
    return found


def _shown(seed: int, *, reboots: bool = False) -> set[str]:
    """What a seed shows of what is expected."""
    result = run(seed, STEPS, reboots=reboots)
    if result.failure:
        _say(result.report())
        raise SystemExit(1)
    return {name for name in _expected(reboots=reboots) if result.seen[name]}


def _expected(*, reboots: bool) -> set[str]:
    return set(EXPECTED_OF_LIVES) if reboots else {*EXPECTED, *(f"verb: {verb.__name__}" for verb in VERBS)}


def _check_cover() -> int:
    lacking = _expected(reboots=False)
    for seed in (*SEEDS, *MORE_SEEDS):
        lacking -= _shown(seed)
    _say(f"shown by no named seed: {sorted(lacking)}")
    return int(bool(lacking))


def _cover(seeds: Iterable[int], *, reboots: bool) -> int:
    """Always take the seed that shows most of what is lacking."""
    shown = {seed: _shown(seed, reboots=reboots) for seed in seeds}
    lacking = _expected(reboots=reboots)
    first = () if reboots else SEEDS
    for seed in first:
        lacking -= shown[seed] if seed in shown else _shown(seed)
    chosen: list[int] = []
    while lacking and (best := max(shown, key=lambda seed: (len(shown[seed] & lacking), -seed))) not in chosen:
        if not shown[best] & lacking:
            break
        chosen.append(best)
        lacking -= shown[best]
    _say(f"{(*first, *sorted(chosen))} show all but {sorted(lacking)}")
    return int(bool(lacking))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _range(text: str) -> range:
    first, end = text.split(":")
    return range(int(first), int(end))


if __name__ == "__main__":
    sys.exit(main())
