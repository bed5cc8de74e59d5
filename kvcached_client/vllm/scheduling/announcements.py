"""What vLLM's KV cache events say of the host pool: which blocks this engine has stored or found there, and lost.

Routers use these events to send a request to the engine that has its prompt. The daemon does not report evictions: this
engine notices them when a later request with the same blocks hits less. Blocks of which it no longer keeps track are
reported as removed, so that no listener counts on them, and lists of blocks do not grow without end.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

from kvcached_client.vllm.scheduling.request_state import Request

#: Blocks that are kept track of: some 50 MB.
BLOCKS_MAX: Final = 1 << 18
#: Announcements that vLLM has not taken; it takes them with every step.
WAITING_MAX: Final = 4096
#: Blocks of one announcement of removals.
_REMOVED_MAX: Final = 1024

log = logging.getLogger("vllm.kvcached")


class StoredBlocks(NamedTuple):
    """Blocks ``[start, stop)`` of a request are in the host pool."""

    request: Request
    start: int
    stop: int


class RemovedBlocks(NamedTuple):
    """Blocks with these hashes are no longer in the host pool, as far as is known."""

    hashes: tuple[bytes, ...]


Announcement: TypeAlias = StoredBlocks | RemovedBlocks


class Announcements:
    """Collects announcements. Does nothing unless vLLM publishes events.

    Args:
        is_on: whether vLLM publishes events.
    """

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        #: The number of the last seek before a block was announced, by hash, in the order of announcements.
        self._known: dict[bytes, int] = {}
        self._waiting: deque[Announcement] = deque(maxlen=WAITING_MAX)
        self._has_lost = False

    def stored(self, request: Request, start: int, stop: int, ticket: int) -> None:
        """Announce blocks of a request that are stored now, but not those that were announced before.

        Args:
            request: the request.
            start: depth of the first block.
            stop: depth behind the last block.
            ticket: the last ticket so far; replies to seeks up to this one may not know of the blocks yet.
        """
        if not self._is_on:
            return
        stop = min(stop, len(request.block_hashes))  # further input of a session may have made the chain shorter
        new = [depth for depth in range(start, stop) if request.block_hashes[depth] not in self._known]
        for depth in range(start, stop):
            self._known.setdefault(request.block_hashes[depth], ticket)
        for first, behind in _runs(new):
            self._announce(StoredBlocks(request, first, behind))
        excess = len(self._known) - BLOCKS_MAX
        if excess > 0:
            self._remove([block_hash for block_hash, _ in zip(self._known, range(excess), strict=False)])

    def found(self, request: Request, hit: int, asked: int, ticket: int) -> None:
        """Announce what the reply to a seek says: its first `hit` blocks are stored, those up to `asked` are not.

        Args:
            request: the request.
            hit: number of leading blocks that the host pool holds.
            asked: number of leading blocks that it could have held.
            ticket: ticket of the seek. Blocks that were announced after it may have been stored after the reply.
        """
        if not self._is_on:
            return
        self.stored(request, 0, hit, ticket)
        missed = request.block_hashes[hit:asked]
        self._remove([each for each in missed if self._known.get(each, ticket) < ticket])

    def cleared(self) -> None:
        """Announce that no block is stored any more."""
        self._remove(list(self._known))

    def take(self) -> list[Announcement]:
        """The announcements since the last call."""
        taken = list(self._waiting)
        self._waiting.clear()
        return taken

    def _remove(self, hashes: Sequence[bytes]) -> None:
        for block_hash in hashes:
            del self._known[block_hash]
        for start in range(0, len(hashes), _REMOVED_MAX):
            self._announce(RemovedBlocks(tuple(hashes[start : start + _REMOVED_MAX])))

    def _announce(self, announcement: Announcement) -> None:
        if len(self._waiting) == WAITING_MAX and not self._has_lost:
            self._has_lost = True
            log.warning("kvcached: vLLM takes no KV cache events: the oldest are lost")
        self._waiting.append(announcement)


def _runs(depths: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Consecutive depths, as the first of them and the one behind the last."""
    first = last = -1
    for depth in depths:
        if depth != last + 1 or first < 0:
            if first >= 0:
                yield first, last + 1
            first = depth
        last = depth
    if first >= 0:
        yield first, last + 1
