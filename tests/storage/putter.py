"""A process that stores and forgets blocks until it is killed: ``python -m tests.storage.putter DIRECTORY SEED``.

It prints a line after each batch. Three threads, a capacity that makes them overwrite each other's slots.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from tests.storage.contract import run_in_threads
from tests.storage.disks import opened, put
from tests.storage.values import TIMEOUT_S, key

NUMBERS = 300


def main() -> None:
    """Never returns."""
    directory, seed = Path(sys.argv[1]), int(sys.argv[2])
    with opened(directory) as storage:

        def work(thread: int) -> None:
            draw = random.Random(seed * 100 + thread)
            while True:
                put(storage, *(draw.randrange(NUMBERS) for _ in range(4)))
                if draw.random() < 0.1:
                    storage.delete([key(draw.randrange(NUMBERS))], timeout_s=TIMEOUT_S)
                sys.stdout.write("batch\n")
                sys.stdout.flush()

        run_in_threads(work, 3)


if __name__ == "__main__":
    main()
