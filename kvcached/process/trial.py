"""A command that is run for its status and its last words, by a process that reaps all its children itself."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

_SAID_BYTES_MAX: Final = 16 * 1024
#: The exit status of a command that finds what it looks at wrong: the first line of its words is what it found.
_WRONG: Final = 2


class Trial:
    """One run of a command, from its start on.

    Args:
        command: the command.
        environment: what is in its environment, beside this process's own.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._said = os.memfd_create("said")
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                env={**os.environ, **environment},
                process_group=0,
            )
        except OSError:
            os.close(self._said)
            raise

    @property
    def pid(self) -> int:
        """Its process id, until `end`."""
        return self._process.pid

    def kill(self) -> None:
        """End it now."""
        self._process.kill()

    def end(self, status: int) -> str:
        """Its exit status is known, a negative one for a signal: what is wrong, in one line, or nothing."""
        self._process.returncode = status  # nobody waits for it any more
        said = os.pread(self._said, _SAID_BYTES_MAX, 0).decode(errors="replace").split("\n")
        os.close(self._said)
        lines = [line.removeprefix("kvcached: ") for line in said if line.strip()]
        if status == 0:
            return ""
        if not lines:
            return f"its check ended with status {status}"
        if status != _WRONG:  # no words for people: the last line of a traceback says most
            return lines[-1]
        return lines[0] if len(lines) == 1 else f"{lines[0]} (and {len(lines) - 1} more)"
