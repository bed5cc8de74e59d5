"""What a process knows of the weights in its memory: of which files they are, and whether they were replaced since.

SGLang can be told to attach its storage again, or for the first time, while it runs. The files may be others by then,
and so may the weights in memory. So what was seen first counts for the process, and not for one storage.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Final

from kvcached_client.engines.weights import FindSnapshot, WeightReader, model_files

#: Where the time of a process's start is in ``/proc/self/stat``, behind the name in parentheses.
_START: Final = 19


class LoadedWeights:
    """The weights of one process.

    Args:
        began_ns: when the process began, as file systems count time. What has not changed since was loaded as it is.

    Attributes:
        replacements: how often they were replaced; 0 = they are those of the files.
        why: what happened last, for people.
    """

    def __init__(self, began_ns: int) -> None:
        self.replacements = 0
        self.why = ""
        self._began_ns = began_ns
        self._content: dict[tuple[str, str | None, str | None], list[list[str]]] = {}
        self._has_old_pages = False
        self._turn = threading.Lock()

    def replaced(self, why: str) -> None:
        """From now on they may be other weights, of which no file tells."""
        with self._turn:
            self.replacements += 1
            self.why = why
            self._has_old_pages = True

    def dropped_pages(self) -> None:
        """SGLang has dropped its own pages: those of the weights before may have been stored until now."""
        if self._has_old_pages:
            self.replaced(self.why)
            self._has_old_pages = False

    def content(
        self,
        path: str,
        revision: str | None = None,
        download_dir: str | None = None,
        *,
        reader: WeightReader,
        find_snapshot: FindSnapshot,
    ) -> list[list[str]]:
        """Name and digest of each file of a model, as they were when this was asked first; none without weight files.

        A file that changed after the process began counts as a replacement: nobody knows which state was loaded.

        Args:
            path: of the model, or its name; or of one file.
            revision: of the model.
            download_dir: where models are.
            reader: reads the files.
            find_snapshot: finds a model that is not given as a directory.

        Raises:
            ValueError: they cannot be read.
        """
        asked = (path, revision, download_dir)
        if asked not in self._content:
            files = model_files(path, revision, download_dir, find_snapshot)
            files = files if any(file.is_weights for file in files) else ()
            try:
                digests = reader.digests(files)
            except OSError as error:
                raise ValueError(f"the weight files of {path} cannot be read: {error}") from error
            if any(file.state.changed >= self._began_ns for file in files):
                self.replaced("weight files have changed since SGLang was started")
            self._content[asked] = [[file.name, digest] for file, digest in zip(files, digests, strict=True)]
        return self._content[asked]


def process_began_ns() -> int:
    """When this process began, as file systems count time."""
    ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[_START])
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 10**9 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - age_ns
