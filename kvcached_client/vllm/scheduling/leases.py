"""Leases of requests, and prepared loads of their hits."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Final

from kvcached_client.protocol.fields import REQUEST_NAME_LENGTH_MAX
from kvcached_client.vllm.daemon.commands import Branches, DropLoad, Fetching, Found, Pin, Release, Seek
from kvcached_client.vllm.daemon.inbox import LinkPort
from kvcached_client.vllm.orders import pack_keys
from kvcached_client.vllm.scheduling.announcements import Announcements
from kvcached_client.vllm.scheduling.chains import Chains, GroupKeys
from kvcached_client.vllm.scheduling.request_state import RequestState
from kvcached_client.vllm.scheduling.token_ids import ToldTokens
from kvcached_client.vllm.scheduling.waiting import PrefillRate

_NAME_DIGEST_BYTES: Final = 16


class Leases:
    """Acquires leases for requests, and releases them.

    Args:
        link: to the daemon's thread.
        chains: how blocks form chains.
        clock: returns seconds.
        prefill: how fast vLLM computes prompts; sent with every seek.
        announcements: of the blocks that replies tell of.
    """

    def __init__(
        self,
        link: LinkPort,
        chains: Chains,
        clock: Callable[[], float],
        prefill: PrefillRate,
        announcements: Announcements,
    ) -> None:
        self._link = link
        self._chains = chains
        self._clock = clock
        self._prefill = prefill
        self._announcements = announcements
        self.told_tokens = ToldTokens(chains.block_size)
        self._tickets = itertools.count(1)
        self._last_ticket = 0
        #: Requests whose lease was asked for, by ticket, with the largest possible hit.
        self._seeking: dict[int, tuple[RequestState, int]] = {}

    def next_ticket(self) -> int:
        """A number for a seek or an offer; its event contains the same number."""
        self._last_ticket = next(self._tickets)
        return self._last_ticket

    def announce(self, tracked: RequestState, start: int, stop: int) -> None:
        """Announce blocks of a request that are stored now."""
        self._announcements.stored(tracked.request, start, stop, self._last_ticket)

    def usable(self, tracked: RequestState) -> int:
        """Upper bound of the blocks of a hit: vLLM must compute at least the last token, to get the next one."""
        request = tracked.request
        return min(self._chains.blocks_in(request.num_tokens - 1), len(tracked.chain), self._chains.blocks_max)

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
        hashes, size = tracked.chain, self._chains.block_size
        most = max(self._chains.blocks_max, tracked.full)  # a branch has blocks of states, too
        blocks, tokens = min(len(hashes), most), self._chains.daemon_tokens(tracked.request.num_tokens)
        tokens = min(max(tokens, blocks * size), most * size + 1)
        ticket = self.next_ticket()
        name = lease_name(tracked.request.request_id, ticket)
        seek = Seek(
            ticket,
            name,
            pack_keys(hashes, 0, blocks),
            tokens,
            load,
            self._chains.daemon_rate(self._prefill.tokens_per_s),
            tracked.wishes.priority,
            tracked.wishes.prefetch,
            tracked.wishes.tenant,
            self._branches(tracked, ticket) if load else None,
            partial(self.told_tokens.of, tracked, 0, blocks) if self.told_tokens.is_on else None,
        )
        if not self._link.submit(seek):
            return False
        tracked.ticket = seek.ticket
        tracked.is_fetching = False
        self._seeking[seek.ticket] = tracked, min(blocks, (tokens - 1) // size) if load else blocks
        return True

    def pin(self, tracked: RequestState) -> bool:
        """Keep the stored blocks of a request's prompt, as the request asks; returns False if it cannot be done."""
        request = tracked.request
        blocks = min(self._chains.blocks_in(request.num_prompt_tokens), len(tracked.chain), self._chains.blocks_max)
        if not (tracked.session and blocks):
            return False
        keys = pack_keys(tracked.chain, 0, blocks)
        units = (request.num_prompt_tokens - 1) // self._chains.unit_tokens
        if self._chains.states and 0 < units * self._chains.unit_blocks <= blocks:
            branch = self._chains.branch(tracked.chain, units)
            keys = pack_keys(branch, 0, len(branch))
        return self._link.submit(Pin(tracked.session, keys, tracked.wishes.pin_ttl_ms))

    def release(self, tracked: RequestState) -> None:
        """Give back the lease and the prepared load of a request."""
        self.drop_load(tracked)
        if tracked.lease is not None:
            self._link.submit(Release(tracked.session, tracked.lease))
            tracked.forget_lease()

    def leave_branch(self, tracked: RequestState) -> None:
        """Exchange a lease for the load of a branch for one on the chain, behind whose end stores go on."""
        units = (tracked.depth - tracked.states) // self._chains.unit_blocks
        self.release(tracked)
        tracked.depth = tracked.offered = units * self._chains.unit_blocks
        self.seek(tracked, load=False)

    def drop_load(self, tracked: RequestState) -> None:
        """Do not load the request's hit, even if the seek has no event yet."""
        tracked.wants_load = False
        if tracked.load is not None:
            self._link.submit(DropLoad(tracked.session, tracked.load.transfer))
            tracked.load = None

    def fetching(self, fetching: Fetching) -> None:
        """Extend the request's deadline, because its seek waits for blocks from storage."""
        tracked, _ = self._seeking[fetching.ticket]
        if tracked.ticket == fetching.ticket:
            tracked.asked_at = self._clock() + fetching.most_s
            tracked.is_fetching = True

    def found(self, found: Found) -> RequestState | None:
        """The request that now has the lease; None if it has asked again since: then this lease is given back."""
        tracked, asked = self._seeking.pop(found.ticket)
        self._announcements.found(tracked.request, found.hit, asked, found.ticket)
        if tracked.ticket != found.ticket:
            if found.load is not None:
                self._link.submit(DropLoad(found.session, found.load.transfer))
            self._link.submit(Release(found.session, found.lease))
            return None
        tracked.ticket = 0
        tracked.session, tracked.lease, tracked.load = found.session, found.lease, found.load
        tracked.depth = tracked.offered = found.hit
        tracked.states = found.states
        if not tracked.wants_load:
            self.drop_load(tracked)
            if tracked.states:
                self.leave_branch(tracked)
        return tracked

    def not_found(self, ticket: int) -> RequestState | None:
        """The request that gets no lease; None if it has asked again since."""
        tracked, _ = self._seeking.pop(ticket)
        if tracked.ticket != ticket:
            return None
        tracked.ticket = 0
        return tracked

    def _branches(self, tracked: RequestState, ticket: int) -> Branches | None:
        """Where the hit of a request may end; None = anywhere."""
        keys, chains = tracked.group_keys, self._chains
        if not chains.states or not isinstance(keys, GroupKeys):
            return None
        name = lease_name(f"{tracked.request.request_id}~states", ticket)
        return keys.branches(name, chains.block_size, self.usable(tracked) // chains.unit_blocks)


def lease_name(request_id: str, ticket: int) -> str:
    """The name of a lease at the daemon. Request ids are used again, but names must be unique.

    A name that is too long for a message, or that UTF-8 cannot encode, is hashed.
    """
    name = f"{request_id}~{ticket}"
    encoded = name.encode(errors="surrogatepass")
    if len(name) <= REQUEST_NAME_LENGTH_MAX and encoded == name.encode(errors="replace"):
        return name
    return hashlib.blake2b(encoded, digest_size=_NAME_DIGEST_BYTES).hexdigest()
