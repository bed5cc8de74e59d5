"""The scheduler's side of offload mode: leases on prefixes in the host pool, and slots for copies.

The engine keeps its own device memory. Its shard processes copy blocks between that memory and host slots
(`offload_shard`); this client asks the daemon which slots. One thread uses it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Self

from msgspec import structs

from kvcached_client.blocks.host_layout import OffloadLayout
from kvcached_client.errors import ErrorCode, Refused, RequestError
from kvcached_client.failpoints import failpoint
from kvcached_client.prefetch import PendingPrefetch
from kvcached_client.protocol.engine import (
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    Acquire,
    Clear,
    Cleared,
    Held,
    HelloOffload,
    LoadPrepared,
    Match,
    Matched,
    Pin,
    Pinned,
    PrepareLoad,
    PrepareStore,
    PrepareStores,
    Release,
    Released,
    StoreOffer,
    StorePrepared,
    StoresPrepared,
    WelcomeOffload,
)
from kvcached_client.protocol.grants import (
    Hold,
    Holds,
    Offered,
    Piece,
    PreparedLoad,
    PreparedStore,
    check_keys,
    check_number,
    check_token_ids,
    hold_of,
    offered_frames,
    slots_of,
    store_of,
    stores_of,
    with_tokens,
)
from kvcached_client.protocol.sessions import StopPolicy
from kvcached_client.transport.patience import with_patience
from kvcached_client.transport.preparations import Preparations
from kvcached_client.transport.prompts import keys_behind
from kvcached_client.transport.session import BlockingSession, SessionChannel, open_channel
from kvcached_client.transport.steps import PendingReply, waiting
from kvcached_client.types import KEY_SIZE_BYTES, LeaseId, TransferId

_INSTANCE_BYTES: Final = 16

__all__ = [
    "Hold",
    "Offered",
    "OffloadClient",
    "OffloadLayout",
    "Piece",
    "PreparedLoad",
    "PreparedStore",
    "new_instance",
]


def new_instance() -> bytes:
    """16 random bytes that name an engine in every hello, so that its next session replaces its last one."""
    return os.urandom(_INSTANCE_BYTES)


class OffloadClient(BlockingSession):
    """An engine's session in offload mode. A context manager. For one thread at a time, as `Client`; not after a fork.

    Every call blocks, until its deadline at most. The form of a call that begins with ``begin_`` sends the request and
    does not wait; other calls may be made before its reply is fetched.

    If the session is over or the daemon is gone, calls raise `Stale` or `TransportError`: close and connect again.

    Attributes:
        generation: generation of the namespace when the session began.
        verify: which loaded blocks are compared with their checksums.
        read_only: the engine only loads: the daemon passes over what it offers, and its shards cannot store.
        tells_tokens: routers may know the tokens of this namespace's blocks: `token_ids` of calls tells the daemon.
    """

    def __init__(
        self,
        channel: SessionChannel,
        welcome: WelcomeOffload,
        block_size: int,
        on_stale: Callable[[], None] | None,
    ) -> None:
        """Use `connect`."""
        super().__init__(channel, welcome, generation=None, on_stale=on_stale)
        self.generation = welcome.generation
        self.verify = welcome.verify
        self.read_only = welcome.read_only
        self.tells_tokens = welcome.token_ids
        self._namespace = welcome.namespace.hex()
        self._block_size = block_size
        self._preparations = Preparations(channel, self.session)
        self._holds = Holds()

    @classmethod
    def connect(
        cls,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        engine: str,
        instance: bytes,
        keyspace: bytes,
        label: str,
        layout: OffloadLayout,
        deadline_ms: int = 1000,
        on_stale: Callable[[], None] | None = None,
        read_only: bool = False,
        wait_s: float = 0.0,
    ) -> Self:
        """Open a session in the namespace that `keyspace` and `layout` define.

        Args:
            run_dir: directory of the daemon's sockets; default: `default_run_dir`.
            engine: name and version of the engine, for logs.
            instance: `new_instance`, the same in every connect of one engine.
            keyspace: 32 bytes, a digest of everything that makes blocks with the same keys interchangeable.
            label: name of the namespace for people, such as the model's.
            layout: shape of a block.
            deadline_ms: limit for one call, and for each step of this one.
            on_stale: called by another thread when a heartbeat's reply says that the session is over.
            read_only: only load. The host pool is mapped so that a stray write ends this process instead of changing a
                block. The daemon's configuration may say so as well, for some users.
            wait_s: how long to wait for a daemon that is not there or not ready. See `Client.connect`.

        Raises:
            ValueError: `wait_s` is negative.
            DaemonUnreachable, DeadlineExceeded: there is no daemon, or it does not reply.
            RequestError: see `kvcached_client.errors`; `unknown_replica` if the daemon does not serve offload mode.
        """
        declared = HelloOffload(
            id=0,
            version_min=PROTOCOL_VERSION_MIN,
            version_max=PROTOCOL_VERSION,
            member=b"",
            engine=engine,
            instance=instance,
            label=label,
            keyspace=keyspace,
            block_size=layout.block_size,
            shards=layout.shards,
            block_bytes=layout.block_bytes,
            fingerprint=layout.fingerprint,
            replicated=layout.replicated,
            read_only=read_only,
            canonical=layout.canonical,
        )
        return with_patience(partial(cls._open, run_dir, declared, deadline_ms, on_stale), wait_s)

    def begin_match(self, keys: bytes, tokens: int, *, full: bool = False) -> PendingReply[int]:
        """How many leading blocks the host pool holds. Locks nothing."""
        number = check_number("tokens", tokens)
        request = Match(id=self._channel.next_id(), epoch=self.epoch, tokens=number, full=full)
        self._channel.send(request, (check_keys(keys),))
        return PendingReply(lambda: self._channel.receive(request, Matched)[0].host)

    match = waiting(begin_match)

    def begin_acquire(
        self,
        request: str,
        keys: bytes,
        tokens: int,
        *,
        full: bool = False,
        priority: int = 0,
        tenant: str = "",
        load_from: int | None = None,
    ) -> PendingReply[Hold]:
        """Lock the longest prefix of a prompt that the host pool holds.

        After a missed deadline, a call with the same `request` gets the same lease, or another one in its place. At any
        other time it is refused.

        Args:
            request: the engine's own id of the request, at most 256 characters.
            keys: 16 bytes for each full block of the prompt.
            tokens: length of the prompt. At least its last token is left to compute, unless `full`.
            full: also use the block with the last token.
            priority: -8 to 7; blocks that only requests of lower priority use are evicted first.
            tenant: whose quota of the host pool the blocks count against, at most 64 characters; "" for nobody's.
            load_from: also `prepare_load`, from this depth to the end of the hit, where possible: see `Hold.load`.

        Raises:
            Refused: the request has a lease already, or is being acquired (`request_conflict`).
        """
        self._holds.check_unused(request)
        keys = check_keys(keys)
        request_id, known = self._channel.next_id(), self._channel.prompts.known_blocks(keys)
        asked = Acquire(
            id=request_id,
            epoch=self.epoch,
            request=request,
            tokens=check_number("tokens", tokens),
            full=full,
            priority=check_number("priority", priority),
            tenant=tenant,
            known=known,
            load_from=None if load_from is None else check_number("load_from", load_from),
        )
        self._channel.send(asked, (keys_behind(keys, known),))
        return PendingReply(partial(self._held, asked, keys))

    acquire = waiting(begin_acquire)

    def begin_prefetch(
        self,
        keys: bytes,
        tokens: int,
        *,
        stop: StopPolicy = "timeout",
        deadline_ms: int | None = None,
        prefill_tokens_per_s: float = 0.0,
        full: bool = False,
        tenant: str = "",
        token_ids: bytes | None = None,
    ) -> PendingPrefetch:
        """Bring a prompt's blocks into the host pool, where `acquire` hits them. See `Client.prefetch`.

        First it waits for blocks that other sessions are storing, also where the daemon has no storage; at most as long
        as the engine would compute them, which `prefill_tokens_per_s` tells. Then it asks storage for the rest.
        `token_ids` are those of the blocks, as for `begin_prepare_store`.
        """
        return PendingPrefetch(
            self._channel,
            0,
            check_keys(keys),
            tokens,
            stop=stop,
            deadline_ms=deadline_ms,
            prefill_tokens_per_s=prefill_tokens_per_s,
            full=full,
            tenant=tenant,
            token_ids=token_ids,
        )

    prefetch = waiting(begin_prefetch)

    def listen(self, wake: int, timeout_s: float) -> bool:
        """Wait for a message of the daemon, or until the descriptor `wake` is readable; False after `timeout_s`."""
        return self._channel.listen(wake, time.monotonic_ns() + int(timeout_s * 1e9))

    def begin_prepare_load(self, lease: LeaseId, start: int, blocks: int) -> PendingReply[PreparedLoad]:
        """Ask for the slots of blocks of a lease's hit, for the shards to read. Each shard reports when it is done.

        Raises:
            Refused: `hit_gone`: the blocks no longer exist, because the namespace was cleared or they proved bad.
            DaemonFailure: `paused`: an administrator has paused copies. Compute the blocks, as after `hit_gone`.
        """
        start, blocks = check_number("start", start), check_number("blocks", blocks)
        request = PrepareLoad(id=self._channel.next_id(), epoch=self.epoch, lease=lease, start=start, blocks=blocks)
        self._preparations.send(request)
        return PendingReply(partial(self._load_prepared, request))

    prepare_load = waiting(begin_prepare_load)

    def cancel_load(self, transfer: TransferId) -> None:
        """Call off a prepared load: no shard will read its slots."""
        self._preparations.cancel("load", transfer, "")

    def begin_prepare_store(
        self, lease: LeaseId, start: int, keys: bytes, token_ids: bytes | None = None
    ) -> PendingReply[PreparedStore]:
        """Offer the next computed blocks of a lease: the reply says which of them to copy to which slots.

        Each shard reports when it is done, unless `transfer` is 0.

        Args:
            lease: lease of the request.
            start: depth of the first block: at first the lease's hit, then `depth` of its last store.
            keys: 16 bytes a block.
            token_ids: tokens of all of the blocks as little-endian int32, for routers; -1 throughout a block whose
                tokens they may not know. Passed over unless `tells_tokens`.
        """
        start, keys = check_number("start", start), check_keys(keys)
        request = PrepareStore(id=self._channel.next_id(), epoch=self.epoch, lease=lease, start=start)
        check_token_ids(keys, token_ids, self._block_size)
        frames = with_tokens(keys, token_ids, are_wanted=self.tells_tokens)
        self._preparations.send(request, frames)
        return PendingReply(partial(self._store_prepared, request, frames))

    prepare_store = waiting(begin_prepare_store)

    def begin_prepare_stores(
        self, offers: Sequence[Offered], releases: Sequence[LeaseId] = ()
    ) -> PendingReply[list[PreparedStore | RequestError]]:
        """Offer blocks of several leases in one message, as `begin_prepare_store` each, then give leases back.

        Args:
            offers: at most `LEASES_PER_MESSAGE_MAX`.
            releases: as many at most; a refusal goes unnoticed.

        Returns:
            For each offer what `prepare_store` returns, or the error that it raises.
        """
        offers = [each.checked() for each in offers]
        named = tuple(StoreOffer(each.lease, each.start, len(each.keys) // KEY_SIZE_BYTES) for each in offers)
        request = PrepareStores(id=self._channel.next_id(), epoch=self.epoch, offers=named, releases=tuple(releases))
        frames = offered_frames(offers, self._block_size if self.tells_tokens else 0)
        self._preparations.send(request, frames)
        for lease in releases:
            self._holds.drop(lease)
        return PendingReply(partial(self._stores_prepared, request, frames))

    def cancel_store(self, transfer: TransferId, why: str) -> None:
        """Call off a prepared store: no shard will write its slots, or continue to."""
        self._preparations.cancel("store", transfer, why)

    def release(self, lease: LeaseId) -> None:
        """Give a lease back. Its copies in flight continue. Does nothing if it is given back, as by a call before."""
        request = Release(id=self._channel.next_id(), epoch=self.epoch, lease=lease)
        self._channel.send(request)
        self._holds.drop(lease)
        try:
            self._channel.receive(request, Released)
        except Refused as error:
            if error.code is not ErrorCode.ALREADY_RELEASED:
                raise

    def post_release(self, lease: LeaseId) -> None:
        """Give a lease back without waiting for the reply. A refusal goes unnoticed."""
        self._channel.send(Release(id=self._channel.next_id(), epoch=self.epoch, lease=lease, reply=False))
        self._holds.drop(lease)

    def pin(self, keys: bytes, *, ttl_ms: int) -> int:
        """Keep the blocks of a prefix that the host pool holds for a time. Returns their number. See `Admin.pin`.

        Raises:
            RequestError: over the quota (`limit`).
        """
        ttl_ms = check_number("ttl_ms", ttl_ms)
        request = Pin(id=self._channel.next_id(), target=self._namespace, ttl_ms=ttl_ms)
        return self._channel.ask(request, Pinned, (check_keys(keys),))[0].host

    def settle(self) -> None:
        """Give back what was granted after a deadline, as every other call does, for an engine that makes no other."""
        self._preparations.cancel_late()
        self.match(b"", 0)  # late replies arrive before the reply to this
        self._channel.give_back_late()

    def clear(self) -> int:
        """Begin a new generation of the namespace: no engine finds what it holds now. Returns the generation."""
        request = Clear(id=self._channel.next_id(), epoch=self.epoch)
        return self._channel.ask(request, Cleared)[0].generation

    def _described(self) -> str:
        return f"{super()._described()}, generation={self.generation}"

    @classmethod
    def _open(
        cls,
        run_dir: str | os.PathLike[str] | None,
        declared: HelloOffload,
        deadline_ms: int,
        on_stale: Callable[[], None] | None,
    ) -> Self:
        """One attempt of `connect`; `declared` lacks what each attempt has of its own."""
        channel, member = open_channel(run_dir, deadline_ms=deadline_ms, failures="raise")
        client: Self | None = None
        try:
            hello = structs.replace(declared, id=channel.next_id(), member=member)
            welcome, _ = channel.ask(hello, WelcomeOffload)
            client = cls(channel, welcome, declared.block_size, on_stale)
            client.start_heartbeats()
        except BaseException:
            # The daemon may have opened the session, and would keep it as long as this process lives.
            if client is None:
                channel.hang_up()
            else:
                client.close()
            raise
        return client

    def _held(self, request: Acquire, keys: bytes) -> Hold:
        prompts = self._channel.prompts
        try:
            held, frames = self._channel.receive(request, Held)
        except Refused as error:
            if error.code is not ErrorCode.UNKNOWN_PREFIX:
                raise
            prompts.forget(keys_behind(keys, request.known)[:KEY_SIZE_BYTES])
            again = structs.replace(request, id=self._channel.next_id(), known=0)
            held, frames = self._channel.ask(again, Held, (keys,))
        prompts.note_all(keys)
        try:
            hold = hold_of(held, frames, len(keys) // KEY_SIZE_BYTES, request.load_from)
        except RequestError:  # a grant that cannot be used is not kept
            unused = Release(
                id=self._channel.next_id(), epoch=self.epoch, lease=held.lease, call_off=held.transfer, reply=False
            )
            self._channel.post(unused)
            raise
        self._holds.add(request.request, hold.lease)
        return hold

    def _load_prepared(self, request: PrepareLoad) -> PreparedLoad:
        reply, frames = self._preparations.receive(request, (), LoadPrepared)
        failpoint("offload.load.prepared")
        slots = slots_of(frames[0], request.blocks)
        return PreparedLoad(TransferId(reply.transfer), reply.generation, slots, request.start)

    def _store_prepared(self, request: PrepareStore, sent: tuple[bytes, ...]) -> PreparedStore:
        reply, frames = self._preparations.receive(request, sent, StorePrepared)
        return store_of(reply, *frames)

    def _stores_prepared(self, request: PrepareStores, frames: tuple[bytes, ...]) -> list[PreparedStore | RequestError]:
        reply, (packed, slots) = self._preparations.receive(request, frames, StoresPrepared)
        return stores_of(reply, packed, slots, len(request.offers))
