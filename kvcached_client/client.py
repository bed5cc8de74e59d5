"""`Client`: the session of an engine's scheduler on the device pool of one replica. Every call blocks."""

from __future__ import annotations

import os
import weakref
from typing import Self, get_args

from kvcached_client.admin import ReportCalls
from kvcached_client.blocks.layout import Layout
from kvcached_client.errors import DaemonUnreachable, ErrorCode, KvcachedError, request_error
from kvcached_client.failpoints import failpoint
from kvcached_client.grants import NOTHING, Grant, blocks_of, check_fence, grant_of
from kvcached_client.keys import KeyChain, Tokens
from kvcached_client.lease import CachePolicy, Lease
from kvcached_client.prefetch import PrefetchCalls
from kvcached_client.protocol.engine import (
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    Acquire,
    Acquired,
    Heartbeat,
    Hello,
    Match,
    Matched,
    Welcome,
)
from kvcached_client.protocol.fields import PRIORITY_MAX, PRIORITY_MIN, RESERVE_REQUEST_PREFIX
from kvcached_client.rejoin import Reserve, declare, rejoin
from kvcached_client.transport.attach import SessionGrant
from kvcached_client.transport.misses import Failures
from kvcached_client.transport.retry_when_freed import with_vacancies
from kvcached_client.transport.run_dir import default_run_dir
from kvcached_client.transport.session import EngineSession, SessionChannel, open_channel
from kvcached_client.types import NO_FENCE, FenceSequence


class Client(EngineSession, ReportCalls, PrefetchCalls):
    """An engine's session on one replica's pool. A context manager. Not thread-safe.

    Close it: for one that is dropped instead, the heartbeats end but no bye is said, for nobody knows whether the
    engine still writes. Its pool is then busy until the session has expired.

    A fork takes no client along: in the child its methods raise `RuntimeError`, and the parent's goes on.

    Where the daemon is killed its workers, and with them the pool, outlive it for a while. An engine then goes on with
    the slots of its leases, and takes those of its reserve for new requests; when a daemon is back, `rejoin` goes on
    with all of them.

    Attributes:
        session: what shard processes need for `map_pool`.
        layout: the shape of a block.
        slots: slots of the pool, the same on every shard.
        epoch: of the pool.
        namespace: 32 bytes, root of every chain of keys.
    """

    _channel: SessionChannel

    def __init__(self, channel: SessionChannel, welcome: Welcome, run_dir: str, *, heartbeat: bool) -> None:
        """Use `connect`."""
        super().__init__(channel, welcome, run_dir, generation=welcome.generation, heartbeat=heartbeat)
        self.layout = welcome.layout
        self.slots = welcome.slots
        self._key_algorithm = welcome.key_algorithm
        self._daemon_epoch = welcome.daemon_epoch
        self._signalled = FenceSequence(0)
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._reserve: Reserve | None = None

    @classmethod
    def connect(
        cls,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        replica: str = "default",
        deadline_ms: int = 1000,
        failures: Failures = "raise",
        layout: Layout | None = None,
        heartbeat: bool = True,
        reserve_blocks: int = 0,
    ) -> Self:
        """Open a session on a replica's pool.

        Args:
            run_dir: where the daemon's sockets are; default: `run_dir.default_run_dir`.
            replica: name of a replica in the daemon's configuration.
            deadline_ms: the longest that one call may take, each step of this one included.
            failures: "raise" raises typed errors. "miss" makes every failure of the daemon look like an empty cache:
                `match` gives 0, `acquire` a lease that is not granted, and the other methods of a lease do nothing.
                `failure_count` counts them, `last_failure` and `Lease.reason` say why; the first of each kind is
                logged. Once a deadline has passed, calls are misses at once until the daemon answers. `connect` always
                raises.
            layout: what the engine was built for; another one on the daemon's side is refused.
            heartbeat: send heartbeats from a thread. Without them the session expires; for tests and short tools.
            reserve_blocks: slots to hold for the time when the daemon is away: `acquire` and `allocate` take from them
                then, and everything is computed. The pool is smaller by them at all other times.

        Raises:
            ValueError: `failures` is neither of the two, or `deadline_ms` is less than 1.
            NoCapacity: there are not as many slots as `reserve_blocks`.
            DaemonUnreachable, DeadlineExceeded: there is no daemon, or it does not answer.
            Refused: unknown replica; another layout; another session, be it an earlier one of this process that was
                not closed, holds the pool; or what listens in `run_dir` belongs to neither root nor this user.
            RequestError: see `kvcached_client.errors`.
        """
        if failures not in get_args(Failures):
            raise ValueError(f"failures is {failures!r}, not one of {', '.join(get_args(Failures))}")
        if deadline_ms < 1:
            raise ValueError(f"deadline_ms is {deadline_ms}, at least 1 is needed")
        directory = os.fspath(default_run_dir() if run_dir is None else run_dir)
        channel, member = open_channel(directory, deadline_ms=deadline_ms, failures=failures)
        try:
            fingerprint = "" if layout is None else layout.fingerprint()
            hello = Hello(
                id=channel.next_id(),
                version_min=PROTOCOL_VERSION_MIN,
                version_max=PROTOCOL_VERSION,
                member=member,
                replica=replica,
                layout=fingerprint,
                client="kvcached_client",
            )
            welcome, _ = channel.ask(hello, Welcome)
            _check_welcome(welcome, fingerprint)
            client = cls(channel, welcome, directory, heartbeat=heartbeat)
        except BaseException:
            # The daemon may have opened the session, and would keep the pool for it as long as this process lives.
            channel.hang_up()
            raise
        try:
            client._hold_reserve(reserve_blocks)
        except BaseException:
            client.close()
            raise
        return client

    @property
    def failure_count(self) -> int:
        """Failures that became misses. A pool that was full is none."""
        return self._channel.misses.count

    @property
    def last_failure(self) -> KvcachedError | None:
        """The last failure that became a miss; None where none has."""
        return self._channel.misses.last_failure

    def chain(self, tokens: Tokens = (), *, lora: str = "", salt: str = "") -> KeyChain:
        """A chain of keys, rooted in the session's namespace, the LoRA adapter and the tenant's salt.

        Raises:
            BadRequest: see `KeyChain`.
        """
        return KeyChain(
            self.namespace, self.layout.block_size, tokens, lora=lora, salt=salt, algorithm=self._key_algorithm
        )

    def match(self, chain: KeyChain, *, full: bool = False) -> int:
        """How many leading blocks are cached, in the pool or in host memory behind it. Touches nothing.

        The last token is left to compute, so a prompt that is cached to its end counts one block less, unless `full`.
        `acquire` may load fewer of those in host memory: the daemon's configuration has a threshold and a quota.

        Raises:
            RequestError, TransportError: see `kvcached_client.errors`.
        """
        if not chain.block_count:
            return 0
        request = Match(id=self._channel.next_id(), epoch=self.epoch, tokens=chain.token_count, full=full)
        with self._channel.misses:
            matched, _ = self._channel.ask(request, Matched, (chain.keys,))
            return matched.device + matched.host
        return 0

    def acquire(
        self,
        request: str,
        chain: KeyChain,
        *,
        reserve_tokens: int = 0,
        cache: CachePolicy = "all",
        full: bool = False,
        priority: int = 0,
    ) -> Lease:
        """Pin the cached blocks of a prompt and get slots for the rest of it.

        Cached blocks that are only in host memory may be on their way when it returns: see `Lease.is_loading`.

        Asking again with the same `request`, after a deadline passed, gives the same lease. Where copies under way are
        about to make room it waits for them, within its deadline.

        Args:
            request: the engine's own id of the request, at most 256 characters.
            chain: the prompt is what it holds now. Extend it with the output as that appears.
            reserve_tokens: output tokens to have slots for from the start.
            cache: which blocks `commit` and `finish` make findable: "all", "prompt" (none with output), "nothing".
            full: also use the block with the prompt's last token if it is cached; nothing is left to compute then.
            priority: -8 to 7; blocks that only requests of lower ones use are evicted first.

        Raises:
            NoCapacity: nothing free and nothing evictable; nothing was taken.
            BadRequest: the prompt is empty (with either setting of ``failures``) or longer than a message may be.
            RequestError, TransportError: see `kvcached_client.errors`.
        """
        lease = _acquire_lease(
            self._channel,
            request,
            chain,
            self._reserve,
            reserve_tokens=reserve_tokens,
            cache=cache,
            full=full,
            priority=priority,
        )
        self._leases.add(lease)
        return lease

    def rejoin(self) -> None:
        """Go on with a daemon that was started anew after this client's was killed: the session and all leases do.

        Leases keep their slots; what they had committed is findable again, and blocks that were on their way from host
        memory are asked for by `Lease.wait_loaded` as if the load had failed. `session`, `epoch` and the leases' ids
        are new ones. Shard processes go on with the memory that they have mapped; to wait for loads they map it again
        with the new `session`. Call it once `is_alive` is False; where it raises, the client is as it was, and calling
        it again may help.

        Raises:
            DaemonUnreachable, DeadlineExceeded: no daemon is there yet.
            Stale: the pool, or the namespace, is not there any more: close the client and connect again.
            RequestError: see `kvcached_client.errors`; the same.
        """
        grant, layout = self.session, self.layout.fingerprint()
        channel, member = open_channel(grant.run_dir, deadline_ms=self._channel.deadline_ms, failures="raise")
        try:
            named = self._channel.named_fence
            fence = named if named > self._signalled else NO_FENCE
            welcome = rejoin(channel, member, grant, self._daemon_epoch, layout, self.namespace, fence)
            _check_welcome(welcome, layout)
            declare(channel, [*self._leases] if self._reserve is None else [self._reserve, *self._leases])
        except BaseException:
            channel.close()  # without a goodbye: leases are being written
            raise
        self._go_on(channel, welcome)

    def signal_fence(self, sequence: FenceSequence) -> None:
        """Say that the engine's queued work up to a fence is over, and with it the use of what was released under it.

        Sent at once if possible, and again with every heartbeat, to a daemon that was started anew, too. A lower number
        than before changes nothing.

        Raises:
            BadRequest: the number is negative, or 2^63 or more.
            DaemonUnreachable: the daemon is gone, or the client closed.
        """
        with self._channel.misses:
            # Noted first: a daemon that is started anew is told of it, too.
            self._signalled = max(self._signalled, check_fence(sequence))
            if self._heartbeat is not None:
                self._heartbeat.signalled = self._signalled
            if self._reserve is not None:
                self._reserve.signal(self._signalled)
            self._channel.post(
                Heartbeat(
                    id=self._channel.next_id(),
                    session=self.session.id,
                    token=self.session.token,
                    fence=self._signalled,
                    reply=False,
                )
            )

    def close(self) -> None:
        """End the session: its leases end, its slots go back to the pool.

        Stop the shard processes before, let no work on the mapped pool be queued, and signal the last fence: blocks
        committed under one that has not signalled are dropped. A process of the session that
        still lives could write, so the daemon then frees nothing: the slots are quarantined, and the pool is busy for
        the next session, until that process is dead.

        Does nothing the second time. In a forked child it only closes the child's copies of descriptors.
        """
        super().close()

    def _go_on(self, channel: SessionChannel, welcome: Welcome) -> None:
        """The session is another one now, over another connection."""
        old, beats = self._channel, self._heartbeat
        if beats is not None:
            beats.close()
        old.close()
        channel.misses, channel.named_fence = old.misses, old.named_fence
        self._channel = channel
        self.session = SessionGrant(id=welcome.session, token=welcome.token, run_dir=self.session.run_dir)
        self.epoch, self._daemon_epoch = welcome.epoch, welcome.daemon_epoch
        if beats is not None:
            self._heartbeat = self._start_heartbeat(welcome, welcome.generation)
            self._heartbeat.signalled = self._signalled
        if self._reserve is not None:
            self._reserve.refill()

    def _hold_reserve(self, blocks: int) -> None:
        if blocks:
            tokens = (blocks - 1) * self.layout.block_size
            name = f"{RESERVE_REQUEST_PREFIX}session {self.session.id}"
            prompt = self.chain((0,))
            keeper = _acquire_lease(
                self._channel, name, prompt, None, reserve_tokens=tokens, cache="nothing", full=False, priority=0
            )
            self._reserve = Reserve(keeper) if keeper.granted else None


def _acquire_lease(
    channel: SessionChannel,
    name: str,
    chain: KeyChain,
    reserve: Reserve | None,
    *,
    reserve_tokens: int,
    cache: CachePolicy,
    full: bool,
    priority: int,
) -> Lease:
    tokens = chain.token_count
    is_valued = PRIORITY_MIN <= priority <= PRIORITY_MAX
    if tokens < 1 or reserve_tokens < 0 or cache not in get_args(CachePolicy) or not is_valued:
        raise request_error(
            ErrorCode.BAD_VALUE,
            f"a prompt of {tokens} tokens, a reserve of {reserve_tokens}, cache {cache!r}, priority {priority}",
            f"at least one token; cache is one of {', '.join(get_args(CachePolicy))}; priorities go from"
            f" {PRIORITY_MIN} to {PRIORITY_MAX}",
        )
    prompt_blocks = blocks_of(tokens, chain.block_size)
    more = blocks_of(tokens + reserve_tokens, chain.block_size) - prompt_blocks

    def attempt(deadline_ns: int) -> Grant:
        request = Acquire(
            id=channel.next_id(),
            epoch=channel.epoch,
            request=name,
            tokens=tokens,
            reserve=more,
            full=full,
            priority=priority,
        )
        reply, frames = channel.ask(request, Acquired, (chain.keys,), deadline_ns=deadline_ns)
        return grant_of(reply, frames, prompt_blocks + more)

    with channel.misses:
        try:
            grant = with_vacancies(channel, attempt)
        except DaemonUnreachable:
            slots = reserve.take(prompt_blocks + more) if reserve is not None and channel.is_gone else None
            if slots is None:
                raise
            grant = NOTHING._replace(table=slots)
        failpoint("client.acquired")
        return Lease(channel, chain, cache, grant, name, reserve)
    lease = Lease(channel, chain, cache, None, name)
    lease.reason = channel.misses.last_reason
    return lease


def _check_welcome(welcome: Welcome, fingerprint: str) -> None:
    if not PROTOCOL_VERSION_MIN <= welcome.version <= PROTOCOL_VERSION:
        raise request_error(
            ErrorCode.UNSUPPORTED_VERSION,
            f"the daemon chose version {welcome.version}, not one of {PROTOCOL_VERSION_MIN} to {PROTOCOL_VERSION}",
            "client and daemon must be at most one version apart",
        )
    welcome.layout.check()
    if fingerprint and welcome.layout.fingerprint() != fingerprint:
        raise request_error(
            ErrorCode.WRONG_LAYOUT,
            f"the pool's layout is {welcome.layout.fingerprint()}, the engine's {fingerprint}",
            "configure the replica for this model, dtype, block size and sharding",
        )
    # A missing package for the keys shows now, not in the first request.
    KeyChain(welcome.namespace, welcome.layout.block_size, algorithm=welcome.key_algorithm)
