"""The crash matrix on the fake CUDA driver: processes die or stop at failpoints of copies, and the driver fails.

    python -m tests.cuda.matrix --seeds 1-1000

Each seed has a mode, a process, a failpoint, an ending, errors and delays of the driver (`plans.py`). Every byte of
every hit is compared; afterwards no granule is left that is not the pool's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from tests.cuda.matrix.children import Unanswered
from tests.cuda.matrix.plans import plan_of
from tests.cuda.matrix.play import Seed, Wrong, fill, play_start, read_all
from tests.cuda.matrix.world import NotWell, World, world
from tests.cuda_driver import build


class Matrix:
    """Plays seeds, as many as possible in one world."""

    def __init__(self, library: Path) -> None:
        self._library = library
        self._world: World | None = None
        self._parts = ExitStack()
        self._older: dict[str, list[int]] = {}
        self.counts: Counter[str] = Counter()

    def play(self, number: int) -> list[str]:
        """What fails under a seed."""
        plan = plan_of(number)
        self.counts[f"{plan.mode} {plan.place.victim}: {plan.ending}"] += not plan.is_start
        self.counts["starts that were refused"] += plan.is_start
        if plan.is_start:
            return play_start(plan, self._library)
        if self._world is None:
            self._world = self._parts.enter_context(world(self._library))
            self._older = {"managed": fill(self._world), "offload": []}
        seed = Seed(plan, self._world, self._older, self.counts)
        seed.play()
        if seed.failures:
            say(*self._world.log.splitlines()[-12:])
        return [*seed.failures, *(self.end() if seed.failures else [])]

    def close(self) -> list[str]:
        """Read all that was ever cached in the world, then end it; what is wrong."""
        if self._world is None:
            return []
        try:
            read_all(self._world, self._older)
        except (Wrong, Unanswered) as error:
            return [str(error), *self.end()]
        return self.end()

    def end(self) -> list[str]:
        """End the world; what is left of it."""
        self._world = None
        try:
            self._parts.close()
        except NotWell as error:
            return [str(error)]
        return []


def main() -> int:
    """Play the seeds; 1 where one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.matrix", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", default="1-1000", help="first-last, or one")
    first, _, last = parser.parse_args().seeds.partition("-")
    seeds, failed, start_s = range(int(first), int(last or first) + 1), 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(build.build(Path(folder)))
        for number in seeds:
            failures = matrix.play(number)
            failed += bool(failures)
            for failure in failures:
                say(f"FAILED {plan_of(number)}: {failure}")
        if left := matrix.close():
            failed += 1
            say(f"FAILED at the end: {left}")
    say(*(f"{count:7} {what}" for what, count in sorted(matrix.counts.items()) if count))
    say(f"{len(seeds)} seeds, {failed} failed, {time.monotonic() - start_s:.0f} s")
    return int(bool(failed))


def say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
