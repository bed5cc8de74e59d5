from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def memfd() -> Iterator[Callable[[bytes], int]]:
    """Makes memory with some content, and closes it at the end. What is to be handed over is duplicated."""
    made: list[int] = []

    def make(content: bytes = b"") -> int:
        made.append(os.memfd_create("test"))
        os.pwrite(made[-1], content, 0)
        return made[-1]

    yield make
    for descriptor in made:
        os.close(descriptor)
