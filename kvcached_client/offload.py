"""The scheduler's side of attached mode: leases on prefixes in the host pool, and copies announced to the daemon.

The engine keeps its own device memory. Its shard processes copy between that and host slots (`attached_shard`); this
client asks which slots. One thread uses it; every call blocks until its deadline at most.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt

from kvcached_client.errors import DeadlineExceeded, ErrorCode, KvcachedError, RequestError, request_error
from kvcached_client.failpoints import failpoint
from kvcached_client.grants import slots_of
from kvcached_client.prefetch import PendingPrefetch, PrefetchResult
from kvcached_client.protocol.engine import (
    EVERY_SHARD,
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    Acquire,
    Bye,
    Clear,
    Cleared,
    CommitStore,
    CompleteLoad,
    Goodbye,
    Held,
    HelloAttached,
    LoadPrepared,
    Match,
    Matched,
    PrepareLoad,
    PrepareStore,
    Release,
    Released,
    Settled,
    StorePrepared,
    WelcomeAttached,
)
from kvcached_client.protocol.storage import StopPolicy
from kvcached_client.transport.attach import SessionGrant, identify
from kvcached_client.transport.channel import SessionChannel
from kvcached_client.transport.heartbeat import Heartbeat
from kvcached_client.transport.run_dir import default_run_dir
from kvcached_client.types import KEY_SIZE_BYTES, LeaseId, TransferId, unpack_ranges

_INSTANCE_BYTES: Final = 16

P = TypeVar("P", LoadPrepared, StorePrepared)
T = TypeVar("T")

_log: Final = logging.getLogger("kvcached_client")


@dataclass(frozen=True, slots=True)
class OffloadLayout:
    """What a block of an engine is, as far as the daemon must know.

    Attributes:
        block_size: tokens.
        shards: processes that hold a part of each block each.
        block_bytes: of one block on one shard, all layers.
        fingerprint: 16 bytes that two engines share only if the bytes of a block mean the same to both.
        replicated: every shard holds the same bytes (latent attention): the daemon keeps them once, whoever wrote them.
    """

    block_size: int
    shards: int
    block_bytes: int
    fingerprint: bytes
    replicated: bool = False


class Hold(NamedTuple):
    """A lease, and how many leading blocks the host pool holds for it."""

    lease: LeaseId
    hit: int


class PreparedLoad(NamedTuple):
    """Where to read: one host slot for each block.

    Attributes:
        transfer: what shards and daemon call it.
        generation: that the blocks' headers must name.
        slots: int32 ``[blocks]``.
    """

    transfer: TransferId
    generation: int
    slots: npt.NDArray[np.int32]


class Piece(NamedTuple):
    """Consecutive blocks of a chain: depth of the first, and how many."""

    start: int
    blocks: int


class PreparedStore(NamedTuple):
    """Where to write.

    Attributes:
        transfer: 0 where there is nothing to copy.
        depth: of the lease now: where its next store starts. Blocks offered behind that found no room; some before it
            may be none that the namespace's write policy has copied.
        generation: for the blocks' headers.
        pieces: which blocks to copy. Some may lie before what was offered: their copies were lost meanwhile.
        slots: int32, one for each block of the pieces, in their order.
    """

    transfer: TransferId
    depth: int
    generation: int
    pieces: tuple[Piece, ...]
    slots: npt.NDArray[np.int32]


def new_instance() -> bytes:
    """What an engine calls itself in every hello, so that a later session replaces its earlier one. 16 random bytes."""
    return os.urandom(_INSTANCE_BYTES)


class PendingAnswer(Generic[T]):
    """A request that was sent, and whose answer may be fetched later, before its deadline. Used by its client's thread.

    Where it is not fetched, what the daemon grants stays granted until the session ends.
    """

    def __init__(self, receive: Callable[[], T]) -> None:
        self._receive = receive

    def result(self) -> T:
        """The answer; waits for it. Once only. Raises as the call does that waits at once."""
        return self._receive()


class OffloadClient:
    """An engine's session in attached mode. A context manager. Not thread-safe, and of no use in a forked child.

    Where the session is over or the daemon gone, calls raise `Stale` or `TransportError`: close it and connect again.

    Attributes:
        session: what shard processes need to join.
        epoch: of the host pool.
        generation: of the namespace when the session began.
        namespace: 32 bytes.
        verify_loads: whether loads compare checksums.
    """

    def __init__(
        self,
        channel: SessionChannel,
        welcome: WelcomeAttached,
        run_dir: str,
        on_stale: Callable[[], None] | None,
    ) -> None:
        """Use `connect`."""
        self.session = SessionGrant(id=welcome.session, token=welcome.token, run_dir=run_dir)
        self.epoch = welcome.epoch
        self.generation = welcome.generation
        self.namespace = welcome.namespace
        self.verify_loads = welcome.verify_loads
        self._channel = channel
        self._channel.epoch = welcome.epoch
        self._is_closed = False
        self._process_id = os.getpid()
        #: Preparations whose answer did not come in time: whether there is a copy to call off is not known.
        self._unsettled: list[tuple[PrepareLoad | PrepareStore, tuple[bytes, ...]]] = []
        self._heartbeat = Heartbeat(
            channel.context,
            channel.endpoint,
            self.session,
            epoch=welcome.epoch,
            generation=None,
            interval_ms=welcome.heartbeat_interval_ms,
            on_stale=on_stale,
        )
        weakref.finalize(self, self._heartbeat.stop).atexit = False

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
    ) -> Self:
        """Open a session in the namespace that `keyspace` and `layout` make.

        Args:
            run_dir: where the daemon's sockets are; default: `run_dir.default_run_dir`.
            engine: name and version of the engine, for logs.
            instance: `new_instance`, the same in every connect of one engine.
            keyspace: 32 bytes, a digest of all that makes blocks with the same keys interchangeable.
            label: what people call the namespace: the model.
            layout: shape of a block.
            deadline_ms: the longest that one call may take, each step of this one included.
            on_stale: called by another thread when heartbeats are told that the session is over.

        Raises:
            DaemonUnreachable, DeadlineExceeded: there is no daemon, or it does not answer.
            RequestError: see `kvcached_client.errors`; `unknown_replica` where the daemon serves no such engines.
        """
        directory = os.fspath(default_run_dir() if run_dir is None else run_dir)
        attached, identified = identify(directory, client="kvcached_client", deadline_ms=deadline_ms)
        try:
            channel = SessionChannel(identified.endpoint, deadline_ms=deadline_ms, attached=attached, failures="raise")
        except BaseException:
            attached.close()
            raise
        try:
            hello = HelloAttached(
                id=channel.next_id(),
                version_min=PROTOCOL_VERSION_MIN,
                version_max=PROTOCOL_VERSION,
                member=identified.member,
                engine=engine,
                instance=instance,
                label=label,
                keyspace=keyspace,
                block_size=layout.block_size,
                shards=layout.shards,
                block_bytes=layout.block_bytes,
                fingerprint=layout.fingerprint,
                replicated=layout.replicated,
            )
            welcome, _ = channel.ask(hello, WelcomeAttached)
            return cls(channel, welcome, directory, on_stale)
        except BaseException:
            channel.hang_up()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether, as far as is known here, the session is still there. If not: close, connect again."""
        return not (self._is_closed or self._channel.is_gone or self._channel.is_stale or self._heartbeat.is_stale)

    def match(self, keys: bytes, tokens: int, *, full: bool = False) -> int:
        """How many leading blocks the host pool holds. Pins nothing."""
        request = Match(id=self._channel.next_id(), epoch=self.epoch, tokens=tokens, full=full)
        return self._channel.ask(request, Matched, (keys,))[0].host

    def begin_acquire(
        self, request: str, keys: bytes, tokens: int, *, full: bool = False, priority: int = 0
    ) -> PendingAnswer[Hold]:
        """As `acquire`, and does not wait. Other calls may be made before the answer is fetched."""
        asked = Acquire(
            id=self._channel.next_id(),
            epoch=self.epoch,
            request=request,
            tokens=tokens,
            full=full,
            priority=priority,
        )
        self._channel.send(asked, (keys,))
        return PendingAnswer(partial(self._held, asked, len(keys) // KEY_SIZE_BYTES))

    def acquire(self, request: str, keys: bytes, tokens: int, *, full: bool = False, priority: int = 0) -> Hold:
        """Pin the longest prefix of a prompt that the host pool holds. Asking again gives the same lease.

        Args:
            request: the engine's own id of the request, at most 256 characters.
            keys: 16 bytes for each full block of the prompt.
            tokens: of the prompt. One at least is left to compute, unless `full`.
            full: also use the block with the last token.
            priority: -8 to 7; blocks that only requests of lower ones use are evicted first.
        """
        return self.begin_acquire(request, keys, tokens, full=full, priority=priority).result()

    def prefetch(
        self,
        keys: bytes,
        tokens: int,
        *,
        stop: StopPolicy = "timeout",
        deadline_ms: int | None = None,
        prefill_tokens_per_s: float = 0.0,
        full: bool = False,
    ) -> PrefetchResult:
        """Bring a prompt's blocks from storage into the host pool, where `acquire` hits them. See `Client.prefetch`."""
        return self.begin_prefetch(
            keys,
            tokens,
            stop=stop,
            deadline_ms=deadline_ms,
            prefill_tokens_per_s=prefill_tokens_per_s,
            full=full,
        ).result()

    def begin_prefetch(
        self,
        keys: bytes,
        tokens: int,
        *,
        stop: StopPolicy = "timeout",
        deadline_ms: int | None = None,
        prefill_tokens_per_s: float = 0.0,
        full: bool = False,
    ) -> PendingPrefetch:
        """As `prefetch`, and does not wait. Other calls may be made before the answer is fetched."""
        return PendingPrefetch(
            self._channel,
            0,
            keys,
            tokens,
            stop=stop,
            deadline_ms=deadline_ms,
            prefill_tokens_per_s=prefill_tokens_per_s,
            full=full,
        )

    def listen(self, wake: int, timeout_s: float) -> bool:
        """Wait until the daemon has said something, or the descriptor `wake` is readable; False after `timeout_s`."""
        return self._channel.listen(wake, time.monotonic_ns() + int(timeout_s * 1e9))

    def prepare_load(self, lease: LeaseId, start: int, blocks: int) -> PreparedLoad:
        """The shards are about to read blocks of a lease's hit. Each of them has to say when it is through.

        Raises:
            Refused: `hit_gone`: the blocks are not to be had any more; the namespace was cleared, or they proved bad.
        """
        return self.begin_prepare_load(lease, start, blocks).result()

    def begin_prepare_load(self, lease: LeaseId, start: int, blocks: int) -> PendingAnswer[PreparedLoad]:
        """As `prepare_load`, and does not wait. Other calls may be made before the answer is fetched."""
        request = PrepareLoad(id=self._channel.next_id(), epoch=self.epoch, lease=lease, start=start, blocks=blocks)
        self._send_prepare(request)
        return PendingAnswer(partial(self._load_prepared, request))

    def cancel_load(self, transfer: TransferId) -> None:
        """No shard will read the slots of a load."""
        request = CompleteLoad(
            id=self._channel.next_id(),
            session=self.session.id,
            token=self.session.token,
            transfer=transfer,
            shard=EVERY_SHARD,
        )
        self._channel.ask(request, Settled, (b"",))

    def prepare_store(self, lease: LeaseId, start: int, keys: bytes) -> PreparedStore:
        """The next blocks of a lease are computed: which have to be copied where.

        Each shard has to say when it is through, unless `transfer` is 0.

        Args:
            lease: of the request.
            start: depth of the first block; the lease's depth, which is its hit at first, then that of its last store.
            keys: 16 bytes a block.
        """
        return self.begin_prepare_store(lease, start, keys).result()

    def begin_prepare_store(self, lease: LeaseId, start: int, keys: bytes) -> PendingAnswer[PreparedStore]:
        """As `prepare_store`, and does not wait. Other calls may be made before the answer is fetched."""
        request = PrepareStore(id=self._channel.next_id(), epoch=self.epoch, lease=lease, start=start)
        self._send_prepare(request, (keys,))
        return PendingAnswer(partial(self._store_prepared, request, keys))

    def cancel_store(self, transfer: TransferId, why: str) -> None:
        """No shard will write the slots of a store, or go on doing so."""
        request = CommitStore(
            id=self._channel.next_id(),
            session=self.session.id,
            token=self.session.token,
            transfer=transfer,
            shard=EVERY_SHARD,
            error=why,
        )
        self._channel.ask(request, Settled)

    def release(self, lease: LeaseId) -> None:
        """Give a lease back. Copies under way for it go on."""
        request = Release(id=self._channel.next_id(), epoch=self.epoch, lease=lease)
        self._channel.ask(request, Released)

    def post_release(self, lease: LeaseId) -> None:
        """Give a lease back without waiting for the daemon's word; that it refused is not heard."""
        self._channel.send(Release(id=self._channel.next_id(), epoch=self.epoch, lease=lease, reply=False))

    def settle(self) -> None:
        """Give back what was granted after a deadline had passed.

        Later calls do that in passing; this is for an engine that has no other one to make.
        """
        self._call_off_late()
        self.match(b"", 0)  # late answers come before the one to this
        self._channel.give_back_late()

    def clear(self) -> int:
        """Nothing that the namespace holds is matched again, by any engine. Returns its new generation."""
        request = Clear(id=self._channel.next_id(), epoch=self.epoch)
        return self._channel.ask(request, Cleared)[0].generation

    def close(self) -> None:
        """End the session. Copies of its shard processes that are under way keep their slots until those are dead.

        Does nothing the second time.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if os.getpid() == self._process_id:
                self._heartbeat.close()
                self._say_goodbye()
        finally:
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _held(self, request: Acquire, blocks: int) -> Hold:
        held = self._channel.receive(request, Held)[0]
        if held.hit > blocks:
            raise _strange(f"a hit of {held.hit} blocks for {blocks} keys")
        return Hold(LeaseId(held.lease), held.hit)

    def _load_prepared(self, request: PrepareLoad) -> PreparedLoad:
        reply, frames = self._receive_prepared(request, (), LoadPrepared)
        failpoint("attached.load.prepared")
        return PreparedLoad(TransferId(reply.transfer), reply.generation, slots_of(frames[0], request.blocks))

    def _store_prepared(self, request: PrepareStore, keys: bytes) -> PreparedStore:
        reply, frames = self._receive_prepared(request, (keys,), StorePrepared)
        failpoint("attached.store.prepared")
        pieces = tuple(Piece(*pair) for pair in unpack_ranges(frames[0]))
        slots = slots_of(frames[1], sum(piece.blocks for piece in pieces))
        return PreparedStore(TransferId(reply.transfer), reply.depth, reply.generation, pieces, slots)

    def _send_prepare(self, request: PrepareLoad | PrepareStore, frames: tuple[bytes, ...] = ()) -> None:
        """Ask for a copy's slots. A copy that was granted too late for its caller is called off with the next one."""
        self._call_off_late()
        self._channel.send(request, frames)

    def _receive_prepared(
        self, request: PrepareLoad | PrepareStore, frames: tuple[bytes, ...], expected: type[P]
    ) -> tuple[P, list[bytes]]:
        try:
            return self._channel.receive(request, expected)
        except DeadlineExceeded:
            self._unsettled.append((request, frames))
            raise

    def _call_off_late(self) -> None:
        """Ask again, with the same ids, for what was not answered in time: the daemon answers as it did then."""
        while self._unsettled:
            request, frames = self._unsettled[0]
            try:
                if isinstance(request, PrepareLoad):
                    self.cancel_load(TransferId(self._channel.ask(request, LoadPrepared, frames)[0].transfer))
                elif transfer := self._channel.ask(request, StorePrepared, frames)[0].transfer:
                    self.cancel_store(TransferId(transfer), "the answer came too late")
            except RequestError as error:
                _log.debug("what was not answered in time was refused: %s", error)
            self._unsettled.pop(0)

    def _say_goodbye(self) -> None:
        try:
            self._channel.ask(Bye(id=self._channel.next_id()), Goodbye)
        except KvcachedError as error:
            _log.info("kvcached session %d closed without the daemon's answer: %s", self.session.id, error)


def _strange(what: str) -> RequestError:
    return request_error(ErrorCode.MALFORMED, f"the daemon replied with {what}", "client and daemon differ in version")
