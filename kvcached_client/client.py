"""The blocking client: `Client` for an engine's scheduler, `Admin` for people and tools."""

from __future__ import annotations

import logging
import os
import weakref
from typing import Final, Self, get_args

from kvcached_client.admin import AdminCalls
from kvcached_client.blocks.layout import Layout
from kvcached_client.errors import ErrorCode, KvcachedError, request_error
from kvcached_client.keys import KeyChain, Tokens
from kvcached_client.lease import CachePolicy, Lease, acquire_lease, check_fence
from kvcached_client.prefetch import PrefetchCalls
from kvcached_client.protocol.engine import (
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    Bye,
    Check,
    CheckReport,
    Describe,
    Description,
    Explain,
    Explained,
    Explanation,
    Goodbye,
    Health,
    HealthReport,
    Hello,
    Inspect,
    InspectReport,
    Match,
    Matched,
    Stats,
    StatsReport,
    Tree,
    TreeNode,
    TreeReport,
    Welcome,
    unpack_tree_nodes,
)
from kvcached_client.protocol.engine import Heartbeat as HeartbeatRequest
from kvcached_client.protocol.fields import RESERVE_REQUEST_PREFIX
from kvcached_client.rejoin import declare, open_channel, rejoin
from kvcached_client.reserve import Reserve
from kvcached_client.transport.attach import SessionGrant
from kvcached_client.transport.channel import FAREWELL_MS, Channel, SessionChannel
from kvcached_client.transport.heartbeat import Heartbeat
from kvcached_client.transport.misses import Failures
from kvcached_client.transport.run_dir import default_run_dir, rpc_endpoint
from kvcached_client.types import NO_FENCE, FenceSequence

_log: Final = logging.getLogger("kvcached_client")


class _Reports:
    """The questions that need no session.

    Each raises `RequestError` where the daemon refuses, `DaemonUnreachable` where none answers, and `DeadlineExceeded`.
    """

    _channel: Channel

    def stats(self) -> StatsReport:
        """Counters and gauges."""
        return self._channel.ask(Stats(id=self._channel.next_id()), StatsReport)[0]

    def health(self) -> HealthReport:
        """What the daemon found when it tried a real request through every worker."""
        return self._channel.ask(Health(id=self._channel.next_id()), HealthReport)[0]

    def check(self) -> CheckReport:
        """What the invariant checker says about the live core."""
        return self._channel.ask(Check(id=self._channel.next_id()), CheckReport)[0]

    def describe(self) -> Description:
        """Replicas, layouts, limits, versions."""
        return self._channel.ask(Describe(id=self._channel.next_id()), Description)[0]

    def tree(self, replica: str = "", *, levels: int = 8, children: int = 8) -> tuple[TreeReport, list[TreeNode]]:
        """What the index holds, and its runs in preorder.

        Args:
            replica: whose tree; "" for those of all replicas.
            levels: how deep, 1 to 64.
            children: how many of each run's children, 1 to 256; the others are counted.
        """
        request = Tree(id=self._channel.next_id(), replica=replica, levels=levels, children=children)
        report, frames = self._channel.ask(request, TreeReport)
        return report, unpack_tree_nodes(frames[0])

    def inspect(self, key: bytes) -> InspectReport:
        """Where the block with a 16-byte key is, and who holds it."""
        return self._channel.ask(Inspect(id=self._channel.next_id(), key=key), InspectReport)[0]

    def explain(
        self, keys: bytes, tokens: int, *, full: bool = False, replica: str = "", namespace: str = ""
    ) -> tuple[Explanation, ...]:
        """What of a prompt would be hit, and why no more, for each replica and attached namespace.

        Args:
            keys: 16 bytes for each full block of the prompt.
            tokens: its length. One of them at least is left to compute, unless `full`.
            full: as in `Client.match`.
            replica: for this one only; "" for all.
            namespace: only where its hex digits begin so; "" for all.
        """
        request = Explain(id=self._channel.next_id(), tokens=tokens, full=full, replica=replica, namespace=namespace)
        return self._channel.ask(request, Explained, (keys,))[0].explanations


class Admin(_Reports, AdminCalls):
    """Questions and orders to a daemon, without a session. A context manager. Not thread-safe."""

    def __init__(self, channel: Channel) -> None:
        """Use `connect`."""
        self._channel = channel

    @classmethod
    def connect(cls, run_dir: str | os.PathLike[str] | None = None, *, deadline_ms: int = 5000) -> Self:
        """Speak to the daemon in `run_dir` (default: `run_dir.default_run_dir`). Calls take at most `deadline_ms`.

        Raises:
            DaemonUnreachable: nothing listens in `run_dir`.
            BadRequest: the path of the socket is too long.
        """
        endpoint = rpc_endpoint(default_run_dir() if run_dir is None else run_dir)
        return cls(Channel(endpoint, deadline_ms=deadline_ms))

    def close(self) -> None:
        """Close the connection. Does nothing the second time."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client(_Reports, PrefetchCalls):
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
        self.session = SessionGrant(id=welcome.session, token=welcome.token, run_dir=run_dir)
        self.layout = welcome.layout
        self.slots = welcome.slots
        self.epoch = welcome.epoch
        self.namespace = welcome.namespace
        self._key_algorithm = welcome.key_algorithm
        self._channel = channel
        self._channel.epoch = welcome.epoch
        self._daemon_epoch = welcome.daemon_epoch
        self._process_id = os.getpid()
        self._is_closed = False
        self._signalled = FenceSequence(0)
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._reserve: Reserve | None = None
        self._heartbeat = self._beat(welcome) if heartbeat else None

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
    def is_alive(self) -> bool:
        """Whether, as far as is known here, the session and its pool are still there. If not: close, connect again."""
        heartbeat_stale = self._heartbeat is not None and self._heartbeat.is_stale
        return not (self._is_closed or self._channel.is_gone or self._channel.is_stale or heartbeat_stale)

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
        lease = acquire_lease(
            self._channel,
            request,
            chain,
            reserve_tokens=reserve_tokens,
            cache=cache,
            full=full,
            priority=priority,
            reserve=self._reserve,
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
                HeartbeatRequest(
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
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if os.getpid() == self._process_id:
                if self._heartbeat is not None:
                    self._heartbeat.close()
                self._say_goodbye()
        finally:
            self._channel.close(linger_ms=FAREWELL_MS if self._channel.is_waiting_in_vain else 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
            self._heartbeat = self._beat(welcome)
            self._heartbeat.signalled = self._signalled
        if self._reserve is not None:
            self._reserve.refill()

    def _beat(self, welcome: Welcome) -> Heartbeat:
        """Heartbeats of the present session."""
        heartbeat = Heartbeat(
            self._channel.context,
            self._channel.endpoint,
            self.session,
            epoch=welcome.epoch,
            generation=welcome.generation,
            interval_ms=welcome.heartbeat_interval_ms,
        )
        # Not at exit: the thread dies with the process.
        weakref.finalize(self, heartbeat.stop).atexit = False
        return heartbeat

    def _hold_reserve(self, blocks: int) -> None:
        if blocks:
            tokens = (blocks - 1) * self.layout.block_size
            name = f"{RESERVE_REQUEST_PREFIX}session {self.session.id}"
            keeper = acquire_lease(
                self._channel, name, self.chain((0,)), reserve_tokens=tokens, cache="nothing", full=False
            )
            self._reserve = Reserve(keeper) if keeper.granted else None

    def _say_goodbye(self) -> None:
        try:
            self._channel.ask(Bye(id=self._channel.next_id()), Goodbye)
        except KvcachedError as error:
            # The session ends anyway, with this process at the latest.
            _log.info("kvcached session %d closed without the daemon's answer: %s", self.session.id, error)


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
