"""A deliberate mistake in the product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

Make = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mistake:
    """A mistake.

    Attributes:
        make: puts it into the product.
        seeds: some that find it; one of them has to.
        reboots: they find it where the machine is restarted now and then.
        sleeps: they find it where device pools are sent to sleep now and then.
    """

    name: str
    make: Make
    seeds: tuple[int, ...]
    reboots: bool = False
    sleeps: bool = False

    @contextmanager
    def made(self) -> Iterator[None]:
        """While the block runs."""
        with pytest.MonkeyPatch.context() as patch:
            self.make(patch)
            yield
