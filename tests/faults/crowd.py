"""A process with many engines in it: ``python -m tests.faults.crowd RUN_DIR ENGINES``. They leave when stdin ends."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

from kvcached_client.offload import OffloadClient, OffloadLayout, new_instance

DEADLINE_MS = 20_000


def main(run_dir: Path, engines: int) -> None:
    with ExitStack() as parts:
        for _ in range(engines):
            parts.enter_context(
                OffloadClient.connect(
                    run_dir,
                    engine="storm",
                    instance=new_instance(),
                    keyspace=b"k" * 32,
                    label="tiny",
                    layout=OffloadLayout(4, 1, 4096, b"f" * 16),
                    deadline_ms=DEADLINE_MS,
                )
            )
        sys.stdout.write("connected\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
