"""Leases of requests, and prepared loads of their hits."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from typing import Final

from kvcached_client.protocol.fields import BLOCKS_PER_MESSAGE_MAX, REQUEST_NAME_LENGTH_MAX
from kvcached_client.vllm.commands import DropLoad, Fetching, Found, LinkPort, Release, Seek
from kvcached_client.vllm.orders import pack_keys
from kvcached_client.vllm.request_state import RequestState
from kvcached_client.vllm.waiting import PrefillRate

_NAME_DIGEST_BYTES: Final = 16


class Leases:
    """Acquires leases for requests, and releases them.

    Args:
        link: to the daemon's thread.
        block_size: tokens in a block.
        clock: returns seconds.
        prefill: how fast vLLM computes prompts; sent with every seek.
    """

    def __init__(self, link: LinkPort, block_size: int, clock: Callable[[], float], prefill: PrefillRate) -> None:
        self._link = link
        self._block_size = block_size
        self._clock = clock
        self._prefill = prefill
        self._tickets = itertools.count(1)
        #: Requests whose lease was asked for, by ticket.
        self._seeking: dict[int, RequestState] = {}

    def next_ticket(self) -> int:
        """A number for a seek or an offer; its event contains the same number."""
        return next(self._tickets)

    def usable(self, tracked: RequestState) -> int:
        """Upper bound of the blocks of a hit: vLLM must compute at least the last token, to get the next one."""
        request = tracked.request
        return min((request.num_tokens - 1) // self._block_size, len(request.block_hashes))

    def ask(self, tracked: RequestState) -> bool:
        """Ask for a lease on a request's hit, and load the hit; returns whether the seek was accepted."""
        self.release(tracked)
        tracked.asked_at = self._clock()
        tracked.is_asked = tracked.wants_load = self.seek(tracked, load=True)
        return tracked.is_asked

    def seek(self, tracked: RequestState, *, load: bool) -> bool:
        """Ask for a lease; returns whether the seek was accepted. Without `load` the lease is for stores only."""
        if not self._link.is_taking:
            return False
        hashes, tokens = tracked.request.block_hashes, tracked.request.num_tokens
        blocks = len(hashes)
        if blocks > BLOCKS_PER_MESSAGE_MAX:
            blocks, tokens = BLOCKS_PER_MESSAGE_MAX, BLOCKS_PER_MESSAGE_MAX * self._block_size
        ticket = self.next_ticket()
        name = lease_name(tracked.request.request_id, ticket)
        seek = Seek(ticket, name, pack_keys(hashes, 0, blocks), tokens, load, self._prefill.tokens_per_s)
        if not self._link.submit(seek):
            return False
        tracked.ticket = seek.ticket
        tracked.is_fetching = False
        self._seeking[seek.ticket] = tracked
        return True

    def release(self, tracked: RequestState) -> None:
        """Give back the lease and the prepared load of a request."""
        self.drop_load(tracked)
        if tracked.lease is not None:
            self._link.submit(Release(tracked.session, tracked.lease))
            tracked.forget_lease()

    def drop_load(self, tracked: RequestState) -> None:
        """Do not load the request's hit, even if the seek has no event yet."""
        tracked.wants_load = False
        if tracked.load is not None:
            self._link.submit(DropLoad(tracked.session, tracked.load.transfer))
            tracked.load = None

    def fetching(self, fetching: Fetching) -> None:
        """Extend the request's deadline, because its seek waits for blocks from storage."""
        tracked = self._seeking[fetching.ticket]
        if tracked.ticket == fetching.ticket:
            tracked.asked_at = self._clock() + fetching.most_s
            tracked.is_fetching = True

    def found(self, found: Found) -> RequestState | None:
        """The request that now has the lease; None if it has asked again since: then this lease is given back."""
        tracked = self._seeking.pop(found.ticket)
        if tracked.ticket != found.ticket:
            if found.load is not None:
                self._link.submit(DropLoad(found.session, found.load.transfer))
            self._link.submit(Release(found.session, found.lease))
            return None
        tracked.ticket = 0
        tracked.session, tracked.lease, tracked.load = found.session, found.lease, found.load
        tracked.depth = tracked.offered = found.hit
        if not tracked.wants_load:
            self.drop_load(tracked)
        return tracked

    def not_found(self, ticket: int) -> RequestState | None:
        """The request that gets no lease; None if it has asked again since."""
        tracked = self._seeking.pop(ticket)
        if tracked.ticket != ticket:
            return None
        tracked.ticket = 0
        return tracked


def lease_name(request_id: str, ticket: int) -> str:
    """The name of a lease at the daemon. Request ids are used again, but names must be unique. Long ones are hashed."""
    name = f"{request_id}~{ticket}"
    if len(name) <= REQUEST_NAME_LENGTH_MAX:
        return name
    return hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=_NAME_DIGEST_BYTES).hexdigest()
