"""A daemon that tells what only a full collection would free: ``python -m tests.daemon.garbage_daemon serve …``.

On SIGUSR2 it writes the numbers of such objects, by their types, into the file `GARBAGE` of its directory.
"""

from __future__ import annotations

import gc
import json
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import kvcached.__main__

GARBAGE = "garbage.json"


def main(arguments: list[str]) -> None:
    """Be a daemon."""
    place = Path(arguments[arguments.index("--config") + 1]).parent / GARBAGE

    def tell(_: int, __: FrameType | None) -> None:
        gc.unfreeze()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        found = Counter(type(each).__qualname__ for each in gc.garbage)
        gc.garbage.clear()
        part = place.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.rename(place)

    signal.signal(signal.SIGUSR2, tell)
    sys.argv = ["kvcached", *arguments[1:]]
    kvcached.__main__.run()


if __name__ == "__main__":
    main(sys.argv)
