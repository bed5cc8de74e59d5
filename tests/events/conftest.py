"""What the tests of events share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.events.publisher import Publisher


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    """A server on sockets of this test's own."""
    publisher = Publisher(tmp_path)
    yield publisher
    publisher.close()
