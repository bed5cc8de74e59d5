"""Chains of pages of one SGLang process in the daemon: what is stored, to store, to load. Knows nothing of SGLang.

A chain is the keys of pages from the beginning of a prompt. SGLang asks for a part of it at a time: a *prefix*, which
it has, and the pages behind it. Every failure of the daemon is a miss.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Final, NamedTuple

from kvcached_client.engines.one_process import FETCH_MS, OneProcessEngine, OneProcessSession
from kvcached_client.errors import ErrorCode, Refused
from kvcached_client.offload import PreparedStore
from kvcached_client.protocol.fields import BLOCKS_PER_MESSAGE_MAX, TOKENS_PER_MESSAGE_MAX
from kvcached_client.types import KEY_SIZE_BYTES

_log: Final = logging.getLogger("sglang.kvcached")


#: How many ends of a prompt are looked at. What is behind the last one that is found is computed.
ENDS_MAX: Final = 1024
#: Pages that the daemon is asked for before the first answer is awaited.
PAGES_TOGETHER: Final = 32
#: How long ends are looked for after storage has taken all the time that there is for it.
GRACE_S: Final = 1.0


class Chain(NamedTuple):
    """Pages of a prompt.

    Attributes:
        keys: 16 bytes for each page, from the beginning of the prompt.
        prefix: how many of them are before the pages that are meant.
    """

    keys: bytes
    prefix: int

    @property
    def pages(self) -> int:
        """Pages, with the prefix."""
        return len(self.keys) // KEY_SIZE_BYTES

    def beginning(self, pages: int) -> Chain:
        """As much of it as a prompt of so many pages has."""
        return Chain(self.part(0, pages), self.prefix)

    def part(self, start: int, stop: int) -> bytes:
        """The keys of pages ``[start, stop)``."""
        return self.keys[start * KEY_SIZE_BYTES : stop * KEY_SIZE_BYTES]


def chain_of(prefix: Sequence[str], hashes: Sequence[str]) -> Chain:
    """The chain with SGLang's hashes, of whose hexadecimal digits 16 bytes are used."""
    digits = "".join(each[: 2 * KEY_SIZE_BYTES] for each in (*prefix, *hashes))
    return Chain(bytes.fromhex(digits), len(prefix))


class Patience:
    """How long one call of SGLang waits for the daemon's storage, with all that it looks up.

    Attributes:
        ends_at_s: when it ends, by `time.monotonic`.
    """

    def __init__(self) -> None:
        self.ends_at_s = time.monotonic() + FETCH_MS / 1000


class PageStore:
    """Pages in the daemon's host pool. Each of SGLang's threads may use it.

    Of a prompt that is longer than a message to the daemon may be, the beginning is stored and found.

    Args:
        finder: has the session in which pages are looked up. A look-up waits for storage; copies do not wait for it.
        copier: has the session in which they are copied.
        page_size: tokens in a page.
    """

    def __init__(self, finder: OneProcessEngine, copier: OneProcessEngine, page_size: int) -> None:
        self._finder, self._copier, self._page_size = finder, copier, page_size
        self._pages_max = min(BLOCKS_PER_MESSAGE_MAX, TOKENS_PER_MESSAGE_MAX // page_size)
        self._has_told_gaps = False

    def connect(self) -> None:
        """Connect to the daemon now, which otherwise the first pages do."""
        for engine in (self._finder, self._copier):
            with engine.guarded():
                pass

    def close(self) -> None:
        """End the sessions; what is stored stays."""
        self._finder.close()
        self._copier.close()

    def found(self, chain: Chain, patience: Patience) -> int:
        """How many pages behind the prefix are stored, from the first on. Brings them from storage."""
        chain, found = chain.beginning(self._pages_max), 0
        with self._finder.guarded() as session:
            if session is not None:
                tokens = chain.pages * self._page_size
                found = session.fetch(chain.keys, tokens, full=True, until_s=patience.ends_at_s)
        return max(found - chain.prefix, 0)

    def ends(self, keys: bytes, window: int, patience: Patience, *, every: bool) -> list[int]:
        """At which depths a prompt may end so that the last pages before it are stored, each found by itself.

        Args:
            keys: 16 bytes for each page of the prompt.
            window: how many pages before an end have to be there.
            patience: when it ends, pages in the host pool are found for `GRACE_S`, and no others.
            every: name all of them, not the last only.

        Returns:
            The depths, in order; those that were found if the time is over before all are. Of long prompts the last
            `ENDS_MAX` depths are looked at, and in the daemon's storage only for the pages at the end of the prompt.
        """
        pages, ends = len(keys) // KEY_SIZE_BYTES, list[int]()
        until_s = max(patience.ends_at_s, time.monotonic()) + GRACE_S
        with self._finder.guarded() as session:
            if session is None:
                return []
            single = _SinglePages(session, keys, self._page_size)

            @cache
            def is_stored(page: int) -> bool:
                return single.is_in_memory(page) or (page >= pages - window and single.is_fetched(page, patience))

            for end in range(pages, max(pages - ENDS_MAX, 0), -1):
                if time.monotonic() > until_s:
                    break
                if all(is_stored(page) for page in reversed(range(max(end - window, 0), end))):
                    ends.append(end)
                    if not every:
                        break
        return ends[::-1]

    def load(self, chain: Chain, places: Sequence[int]) -> int:
        """Copy the pages behind the prefix to their places; how many are there now, from the first on."""
        chain = chain.beginning(self._pages_max)
        with self._copier.guarded() as session:
            if session is None or chain.pages <= chain.prefix:
                return 0
            tokens = chain.pages * self._page_size
            with session.lease(chain.keys, tokens, full=True, load_from=chain.prefix) as hold:
                count = hold.hit - chain.prefix
                if count <= 0:
                    return 0
                plan = hold.load
                if plan is None:
                    with session.turn:
                        plan = session.client.prepare_load(hold.lease, chain.prefix, count)
                with _called_off(session, partial(session.client.cancel_load, plan.transfer)):
                    job = plan.job(chain.keys, places, first=chain.prefix)
                bad = session.shard.load(job)
                return min(bad, default=count)
        return 0

    def store(self, chain: Chain, places: Sequence[int]) -> int:
        """Copy the pages behind the prefix from their places; how many are stored now, from the first on."""
        chain, depth = chain.beginning(self._pages_max), 0
        with self._copier.guarded() as session:
            if session is None or chain.pages <= chain.prefix:
                return 0
            tokens, has_passed_over = chain.pages * self._page_size, False
            with session.lease(chain.keys, tokens, full=True) as (lease, hit, _, _):
                depth = hit
                while chain.prefix <= depth < chain.pages:
                    with session.turn:
                        plan = session.client.prepare_store(lease, depth, chain.part(depth, chain.pages))
                    if plan.transfer and not _copied(session, chain, plan, places):
                        break
                    if plan.depth <= depth:
                        break  # the host pool has no room
                    has_passed_over |= sum(piece.blocks for piece in plan.pieces if piece.start >= depth) < (
                        plan.depth - depth
                    )
                    depth = plan.depth
            if depth < chain.prefix:
                self._tell_gap(depth, chain.prefix)
            elif has_passed_over:  # for the daemon's write policy, or because another engine stores them
                with session.turn:
                    depth = session.client.match(chain.keys, tokens, full=True)
        return max(depth - chain.prefix, 0)

    def _tell_gap(self, depth: int, prefix: int) -> None:
        level = logging.DEBUG if self._has_told_gaps else logging.WARNING
        self._has_told_gaps = True
        _log.log(
            level,
            "kvcached: pages of a prompt are not stored, because the daemon has %d of the %d pages before them: it had "
            "no room for the others or was not there, or SGLang stores with write_back, which is not served",
            depth,
            prefix,
        )

    def clear(self) -> bool:
        """Have no engine find what is stored now; False if the daemon cannot be told at present.

        Raises:
            Refused: this engine may not clear, whenever it asks, as one that may only read.
        """
        refusal = None
        with self._copier.guarded() as session:
            if session is not None:
                try:
                    with session.turn:
                        session.client.clear()
                except Refused as error:
                    if error.code is not ErrorCode.FORBIDDEN:
                        raise  # too many requests, for example: for now only
                    refusal = error
                else:
                    return True
        if refusal is not None:
            raise refusal
        return False


class _SinglePages:
    """Pages of a prompt of which each is a chain of its own.

    Args:
        session: in which they are looked up.
        keys: 16 bytes for each page.
        page_size: tokens in a page.
    """

    def __init__(self, session: OneProcessSession, keys: bytes, page_size: int) -> None:
        self._session, self._keys, self._page_size = session, keys, page_size
        self._in_memory: dict[int, bool] = {}

    def is_in_memory(self, page: int) -> bool:
        """Whether the host pool has a page. The daemon is asked for some of those before it, too."""
        if page not in self._in_memory:
            together = range(page, max(page - PAGES_TOGETHER, -1), -1)
            client = self._session.client
            with self._session.turn:
                asked = [client.begin_match(self._key(each), self._page_size, full=True) for each in together]
                counts = [each.result() for each in asked]
            self._in_memory.update({each: count == 1 for each, count in zip(together, counts, strict=True)})
        return self._in_memory[page]

    def is_fetched(self, page: int, patience: Patience) -> bool:
        """Whether a page that was not in the host pool has come from storage."""
        if time.monotonic() >= patience.ends_at_s:
            return False
        return self._session.fetch(self._key(page), self._page_size, full=True, until_s=patience.ends_at_s) == 1

    def _key(self, page: int) -> bytes:
        return self._keys[page * KEY_SIZE_BYTES : (page + 1) * KEY_SIZE_BYTES]


def _copied(session: OneProcessSession, chain: Chain, plan: PreparedStore, places: Sequence[int]) -> bool:
    """Make a prepared store, or call it off: False if it is of pages that SGLang did not name."""
    if any(piece.start < chain.prefix for piece in plan.pieces):
        with session.turn:
            session.client.cancel_store(plan.transfer, "copies of earlier pages were lost")
        return False
    with _called_off(session, partial(session.client.cancel_store, plan.transfer, "its places are not known")):
        job = plan.job(chain.keys, places, first=chain.prefix)
    session.shard.store(job)
    return True


@contextlib.contextmanager
def _called_off(session: OneProcessSession, cancel: Callable[[], None]) -> Iterator[None]:
    """Call a prepared transfer off if the block fails: the daemon keeps its slots until it hears of them."""
    try:
        yield
    except BaseException:
        with session.turn:
            cancel()
        raise
