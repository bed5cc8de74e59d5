"""Clears of SGLang's pages that the daemon has not confirmed. Knows nothing of SGLang."""

from __future__ import annotations

import contextlib
import logging
from typing import Final, NamedTuple

from kvcached_client.errors import Refused
from kvcached_client.sglang.page_store import PageStore
from kvcached_client.sglang.side_pools import SidePools

_log: Final = logging.getLogger("sglang.kvcached")


class Pools(NamedTuple):
    """All pools of a model.

    Attributes:
        pages: of keys and values.
        side_pools: the others.
    """

    pages: PageStore
    side_pools: SidePools

    def clear(self) -> bool:
        """As `PageStore.clear`."""
        return self.pages.clear() and self.side_pools.clear()

    def is_cleared(self) -> bool:
        """Whether nothing is left of what was stored; false if the daemon does not say so."""
        with contextlib.suppress(Refused):
            return self.clear()
        return False

    def close(self) -> None:
        """End the sessions; what is stored stays."""
        self.side_pools.close()
        self.pages.close()

    def discard(self) -> None:
        """End the sessions, and have the daemon drop what is stored if it answers: nobody will find it any more."""
        self.is_cleared()
        self.close()


class Ended(NamedTuple):
    """A clear that is owed no longer.

    Attributes:
        pools: those that were to be cleared.
        is_refused: nothing was cleared, and nothing would be if the daemon were asked again.
    """

    pools: Pools
    is_refused: bool


class OwedClears:
    """Pools that are to be cleared, in use or not: only by their sessions can the daemon be told."""

    def __init__(self) -> None:
        self._owed: list[Pools] = []

    def __contains__(self, pools: object) -> bool:
        return pools in self._owed

    def add(self, pools: Pools) -> None:
        """Owe the daemon a clear."""
        if pools not in self._owed:
            self._owed.append(pools)

    def drop(self, pools: Pools) -> None:
        """Owe it no longer."""
        if pools in self._owed:
            self._owed.remove(pools)

    def make_up(self) -> list[Ended]:
        """Tell the daemon of each; which have ended. A refusal is logged in the daemon's own words."""
        ended = []
        for pools in list(self._owed):
            is_refused = False
            try:
                if not pools.clear():
                    continue
            except Refused as error:
                is_refused = True
                _log.warning("kvcached: nothing is cleared, and other engines find what is stored: %s", error)
            self.drop(pools)
            ended.append(Ended(pools, is_refused))
        return ended

    def give_up(self) -> list[Pools]:
        """Owe nothing from now on; what was owed. The log says who still finds it."""
        owed, self._owed = self._owed, []
        if owed:
            _log.warning(
                "kvcached: what SGLang was told to clear is not cleared, because the daemon does not answer: other "
                "engines, and this SGLang when its storage is attached again, find it; use kvcached clear"
            )
        return owed
