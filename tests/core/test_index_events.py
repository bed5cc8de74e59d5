"""Routers that follow the events of the index are exact, whatever they have missed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcached.core.slots import announced
from kvcached.core.transfers import loads, stores
from kvcached.events import stream
from tests.core.history import Choose, History, Operation, play, play_drawn
from tests.core.offload_drivers import MixedDriver, OffloadDriver
from tests.core.test_storage_model import StorageHistory
from tests.events.followers import Followers

STEPS = 300
SEEN = {"replays", "snapshots", "pieces", "exact", "told", "untold", "AllRemoved", "BlocksStored", "BlocksRemoved"}


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    """Short copies, clears of many blocks, and batches and snapshots of many pieces, between which much happens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stores, "STORE_BLOCKS_MAX", 3)
        patch.setattr(loads, "LOAD_BLOCKS_MAX", 2)
        patch.setattr(stream, "SLOTS_PER_PIECE", 5)
        patch.setattr(stream, "EVENTS_PER_PIECE", 2)
        patch.setattr(stream, "CHANGES_PER_FLUSH_MAX", 4)
        patch.setattr(stream, "KEYS_PER_EVENT_MAX", 6)
        patch.setattr(announced, "_GONE_MAX", 2)
        yield


def followed(kind: type[History]) -> Callable[[Choose], History]:
    """A history with routers beside it."""
    base: Any = kind

    class Followed(base):  # type: ignore[misc]
        def __init__(self, choose: Choose) -> None:
            super().__init__(choose)
            self.followers = Followers(choose, self.cache)
            self.told: Counter[str] = Counter()

        def do(self, operation: Operation) -> None:
            super().do(operation)
            self.told.update(type(change).__name__ for change in self.cache.index_changes)
            self.followers.step()

        def end(self) -> None:
            super().end()
            self.followers.end()

        def seen(self) -> Counter[str]:
            seen: Counter[str] = super().seen()
            return seen + self.followers.seen() + self.told

    return Followed


@pytest.mark.parametrize(
    ("kind", "seeds"),
    [
        pytest.param(MixedDriver, [1], id="MixedDriver"),
        pytest.param(OffloadDriver, [0], id="OffloadDriver"),
        pytest.param(StorageHistory, [16], id="StorageHistory"),  # in which storage brings blocks, as in those below
        *(
            pytest.param(kind, seeds, id=f"{kind.__name__}, more", marks=pytest.mark.full)
            for kind, seeds in (
                (MixedDriver, range(27, 32)),
                (OffloadDriver, range(27, 32)),
                (StorageHistory, [53, 58, 66, 67]),
            )
        ),
    ],
)
def test_snapshot_and_events_make_the_index(kind: type[History], seeds: Iterable[int]) -> None:
    """After any history, whoever has a snapshot and the events behind it knows exactly the daemon's index."""
    seen = play(followed(kind), seeds, STEPS)

    wanted = {*SEEN, "prefetched_blocks"} if kind is StorageHistory else SEEN
    assert {name for name, count in seen.items() if count} >= wanted


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_snapshot_and_events_make_the_index_after_any_short_history(data: st.DataObject) -> None:
    """The same for any short history; a failing one is shrunk to its shortest form."""
    play_drawn(followed(MixedDriver), data, 25)
