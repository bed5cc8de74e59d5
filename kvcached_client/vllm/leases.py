"""What requests hold at the daemon: leases, and loads of their hits that wait to be used."""

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
    """Asks for leases and gives them back.

    Args:
        link: to the daemon.
        block_size: tokens of a block.
        clock: in seconds.
        prefill: how fast vLLM computes prompts, which every question says.
    """

    def __init__(self, link: LinkPort, block_size: int, clock: Callable[[], float], prefill: PrefillRate) -> None:
        self._link = link
        self._block_size = block_size
        self._clock = clock
        self._prefill = prefill
        self._tickets = itertools.count(1)
        #: Those whose lease was asked for, by ticket.
        self._seeking: dict[int, RequestState] = {}

    def next_ticket(self) -> int:
        """A number for a question, which comes back with its answer."""
        return next(self._tickets)

    def usable(self, tracked: RequestState) -> int:
        """Blocks that a hit may have: one token at least is left to compute, since the next one comes out of it."""
        request = tracked.request
        return min((request.num_tokens - 1) // self._block_size, len(request.block_hashes))

    def ask(self, tracked: RequestState) -> bool:
        """Ask for a request's hit, to load it; whether that was possible."""
        self.release(tracked)
        tracked.asked_at = self._clock()
        tracked.is_asked = tracked.wants_load = self.seek(tracked, load=True)
        return tracked.is_asked

    def seek(self, tracked: RequestState, *, load: bool) -> bool:
        """Ask for a lease; whether that was possible. Without `load` it is for storing only."""
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
        """Give back what a request holds."""
        self.drop_load(tracked)
        if tracked.lease is not None:
            self._link.submit(Release(tracked.session, tracked.lease))
            tracked.forget_lease()

    def drop_load(self, tracked: RequestState) -> None:
        """The hit will not be loaded; one that is still being asked for neither."""
        tracked.wants_load = False
        if tracked.load is not None:
            self._link.submit(DropLoad(tracked.session, tracked.load.transfer))
            tracked.load = None

    def fetching(self, fetching: Fetching) -> None:
        """The answer may take longer: blocks come from storage."""
        tracked = self._seeking[fetching.ticket]
        if tracked.ticket == fetching.ticket:
            tracked.asked_at = self._clock() + fetching.most_s
            tracked.is_fetching = True

    def found(self, found: Found) -> RequestState | None:
        """The request that has a lease now; None where it asked anew since, and this one is given back."""
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
        """The request that gets no lease; None where it asked anew since."""
        tracked = self._seeking.pop(ticket)
        if tracked.ticket != ticket:
            return None
        tracked.ticket = 0
        return tracked


def lease_name(request_id: str, ticket: int) -> str:
    """What a lease is called at the daemon: names are not used again, request ids are. Too long ones are digests."""
    name = f"{request_id}~{ticket}"
    if len(name) <= REQUEST_NAME_LENGTH_MAX:
        return name
    return hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=_NAME_DIGEST_BYTES).hexdigest()
