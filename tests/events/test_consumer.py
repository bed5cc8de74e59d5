"""The consumer that docs/events.md shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.events.publisher import Publisher
from tests.project.source_tree import ROOT


@pytest.fixture
def follower(publisher: Publisher) -> Iterator[Any]:
    """The consumer of the document, connected."""
    (program,) = re.findall(r"```python consumer\n(.*?)```", (ROOT / "docs/events.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)  # noqa: S102 - our own document
    follower = names["Follower"](*publisher.endpoints)
    yield follower
    follower.context.destroy(linger=0)


def test_consumer_of_the_document_is_exact(publisher: Publisher, follower: Any) -> None:
    """It begins with a snapshot, is exact after a gap that is longer than what is kept, and keeps no empty set."""
    publisher.store(10)
    follower.follow()
    assert follower.blocks == publisher.right()

    publisher.store(3)
    publisher.remove(2)
    while follower.last < publisher.last:
        follower.follow()
    assert follower.blocks == publisher.right()

    follower.last -= 10_000  # as if it had missed so many
    publisher.clear()
    publisher.store(5)
    while follower.last < publisher.last:
        follower.follow()
    assert follower.blocks == publisher.right()

    publisher.clear()
    while follower.last < publisher.last:
        follower.follow()
    assert follower.blocks == {}
