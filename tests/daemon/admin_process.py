"""An administrator's process for tests: asks a daemon what each line names, and says how it went."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from kvcached_client import Admin
from tests.line_process import outcome, say

_QUESTIONS: Mapping[str, Callable[[Admin], object]] = {
    "health": lambda admin: admin.health().ok,
    "stats": lambda admin: admin.stats().sessions,
    "describe": lambda admin: admin.describe().pid > 0,
    "clear": lambda admin: admin.clear("default", deadline_ms=10_000).blocks,
    "pause": lambda admin: admin.pause("").holds,
    "resume": lambda admin: admin.resume("").state,
}


def main() -> None:
    """Run until stdin ends."""
    run_dir = Path(sys.argv[1])
    say("ready")
    for line in sys.stdin:
        say(outcome(partial(_asked, run_dir, line.strip())))


def _asked(run_dir: Path, question: str) -> object:
    with Admin.connect(run_dir, deadline_ms=10_000) as admin:
        return _QUESTIONS[question](admin)


if __name__ == "__main__":
    main()
