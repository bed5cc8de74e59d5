"""A sound worker that waits in the middle of a copy: ``gated_worker.py DIRECTORY FD NAME``.

Where there is a file `GATED` in the directory, the first copy that is behind its first layer removes it, and then
writes its shard into the FIFO `ENTERED`, and waits for somebody to write the FIFO `RELEASED`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvcached.worker import main as worker_main
from kvcached.worker import shard
from kvcached.worker.copier import StripCopies
from kvcached.worker.copier_host import HostCopier

GATED = "gated"
ENTERED = "entered"
RELEASED = "released"


class GatedCopier(HostCopier):
    """Copies, once it is let."""

    directory = Path()
    shard = ""

    def to_host(self, strip: StripCopies) -> None:
        self._wait(strip)
        super().to_host(strip)

    def to_device(self, strip: StripCopies) -> None:
        self._wait(strip)
        super().to_device(strip)

    def _wait(self, strip: StripCopies) -> None:
        if strip.host_bytes and _removed(self.directory / GATED):
            (self.directory / ENTERED).write_text(self.shard)
            (self.directory / RELEASED).open("rb").close()


def _removed(path: Path) -> bool:
    """Whether this process was the one that removed it."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def main(arguments: list[str]) -> int:
    """Be a worker."""
    GatedCopier.directory = Path(arguments[1])
    GatedCopier.shard = arguments[3].rpartition("/")[2]
    shard.HostCopier = GatedCopier  # type: ignore[attr-defined]
    return worker_main.main([arguments[0], arguments[2]])


if __name__ == "__main__":
    sys.exit(main(sys.argv))
