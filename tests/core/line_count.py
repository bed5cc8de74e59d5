"""What some work costs, without a clock."""

from __future__ import annotations

import sys
from collections.abc import Callable


def count_lines(work: Callable[[], object], most: int) -> int:
    """Lines of Python that some work executes; stops it beyond `most`."""
    lines = 0

    def trace(frame: object, event: str, argument: object) -> object:
        nonlocal lines
        lines += event == "line"
        assert lines <= most
        return trace

    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        work()
    finally:
        sys.settrace(None)
    return lines
