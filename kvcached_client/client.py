"""`Client`: the session of an engine's scheduler on the device pool of one replica. Every call blocks.

`ClientSteps` is what it shares with `kvcached_client.aio.AsyncClient`, whose calls are awaited instead.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Self, Unpack, get_args

from kvcached_client.admin import ReportCalls
from kvcached_client.batch import CallBatch
from kvcached_client.blocks.layout import Layout
from kvcached_client.errors import KvcachedError
from kvcached_client.keys import KeyChain, Tokens
from kvcached_client.lease import CachePolicy, Granted, L, Lease, LeaseOptions, acquiring, check_chain, check_kind
from kvcached_client.lease_steps import LeaseSteps
from kvcached_client.prefetch import PrefetchCalls
from kvcached_client.protocol.engine import (
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    Heartbeat,
    Hello,
    Match,
    Matched,
    Welcome,
)
from kvcached_client.protocol.fields import RESERVE_REQUEST_PREFIX, TELLS_TOKENS
from kvcached_client.protocol.grants import check_fence
from kvcached_client.protocol.welcome import check_welcome, tells_tokens
from kvcached_client.rejoin import Reserve, declare, rejoin
from kvcached_client.transport.attach import SessionGrant
from kvcached_client.transport.misses import Failures
from kvcached_client.transport.patience import with_patience
from kvcached_client.transport.session import BlockingSession, EngineSession, SessionChannel, open_channel
from kvcached_client.transport.steps import Steps, complete
from kvcached_client.types import NO_FENCE, ChainKind, FenceSequence


class ClientSteps(EngineSession):
    """A session on one replica's pool, and its calls in steps. `Client` describes them.

    Attributes:
        layout: shape of a block.
        slots: number of slots in the pool, the same on every shard.
    """

    def __init__(self, channel: SessionChannel, welcome: Welcome, *, heartbeat: bool) -> None:
        """Use `connect`."""
        super().__init__(channel, welcome, generation=welcome.generation, heartbeat=heartbeat)
        self.layout = welcome.layout
        self.slots = welcome.slots
        self._chain_kind = ChainKind(welcome.namespace, welcome.layout.block_size, welcome.key_algorithm)
        self._daemon_epoch = welcome.daemon_epoch
        self._signalled = FenceSequence(0)
        #: Granted leases by the id of their request; a lease that nobody has any more is in nobody's way.
        self._leases: weakref.WeakValueDictionary[str, LeaseSteps] = weakref.WeakValueDictionary()
        self._reserve: Reserve | None = None

    @classmethod
    def open(
        cls,
        run_dir: str | os.PathLike[str] | None,
        *,
        replica: str = "default",
        deadline_ms: int = 1000,
        failures: Failures = "raise",
        layout: Layout | None = None,
        heartbeat: bool = True,
        reserve_blocks: int = 0,
    ) -> Self:
        """`Client.connect`: one attempt, which blocks."""
        if failures not in get_args(Failures):
            raise ValueError(f"failures is {failures!r}, not one of {', '.join(get_args(Failures))}")
        if reserve_blocks < 0:
            raise ValueError(f"reserve_blocks is {reserve_blocks}, and 0 is the least: it holds no slots in reserve")
        channel, member = open_channel(run_dir, deadline_ms=deadline_ms, failures=failures)
        client: Self | None = None
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
                capabilities=(TELLS_TOKENS,),
            )
            welcome, _ = channel.ask(hello, Welcome)
            check_welcome(welcome, fingerprint)
            client = cls(channel, welcome, heartbeat=heartbeat)
            client.start_heartbeats()
            client._hold_reserve(reserve_blocks)
        except BaseException:
            # The daemon may have opened the session, and would keep the pool for it as long as this process lives.
            if client is None:
                channel.hang_up()
            else:
                client.close()
            raise
        return client

    @property
    def failure_count(self) -> int:
        """Number of failures that became misses. A full pool is not a failure."""
        return self._channel.misses.count

    @property
    def last_failure(self) -> KvcachedError | None:
        """The last failure that became a miss, if any."""
        return self._channel.misses.last_failure

    def chain(self, tokens: Tokens = (), *, lora: str = "", salt: str = "") -> KeyChain:
        """A `KeyChain`, with its errors. Its root is the session's namespace, the LoRA adapter and a tenant's salt."""
        namespace, block_size, algorithm = self._chain_kind
        return KeyChain(
            namespace, block_size, tokens, lora=lora, salt=salt, algorithm=algorithm,
            keeps_tokens=self._channel.tells_tokens,
        )  # fmt: skip

    def matching(self, chain: KeyChain, *, full: bool) -> Steps[int]:
        """`Client.match`."""
        check_chain(chain)
        if not chain.block_count:
            return 0
        with self._channel.misses:
            check_kind(chain, self._chain_kind)
            request = Match(id=self._channel.next_id(), epoch=self.epoch, tokens=chain.token_count, full=full)
            asked = self._channel.asking(request, Matched, (chain.keys,), deadline_ns=self._channel.deadline_ns())
            matched, _ = yield from asked
            return matched.device + matched.host
        return 0

    def acquiring(
        self, make: Callable[..., L], request: str, chain: KeyChain, **options: Unpack[LeaseOptions]
    ) -> Steps[L]:
        """`Client.acquire`, for a lease of the class `make`."""
        granted = Granted(self._chain_kind, self._leases, self._reserve)
        lease = yield from acquiring(make, self._channel, request, chain, granted, **options)
        if lease.granted:
            self._leases[request] = lease
        return lease

    def rejoin_next(self) -> None:
        """`Client.rejoin` with the next daemon, which blocks. No call may be under way."""
        grant, layout = self.session, self.layout.fingerprint()
        channel, member = open_channel(grant.run_dir, deadline_ms=self._channel.deadline_ms, failures="raise")
        try:
            named = self._channel.named_fence
            fence = named if named > self._signalled else NO_FENCE
            welcome = rejoin(channel, member, grant, self._daemon_epoch, layout, self.namespace, fence)
            check_welcome(welcome, layout)
            declare(channel, filter(None, (self._reserve, *self._leases.values())))
        except BaseException:
            channel.close()  # without a goodbye, because the engine is writing to its slots
            raise
        self._go_on(channel, welcome)

    def signal_fence(self, sequence: FenceSequence) -> None:
        """Report that the engine's queued work up to a fence is done: slots released under that fence are free now.

        It is sent at once if possible, and again with every heartbeat, also to the next daemon. A lower number than in
        an earlier call changes nothing.

        Raises:
            BadRequest: the number is negative, or 2^63 or more.
            DaemonUnreachable: the daemon is gone, or the client is closed.
        """
        with self._channel.misses:
            # Noted first, so that it also reaches the next daemon.
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
        """End the session: its leases end, and its slots go back to the pool.

        Before that, stop the shard processes, finish all queued work on the mapped pool, and signal the last fence:
        blocks committed under a fence that has not signalled are dropped. As long as another process of the session
        lives, it could write to the pool: the daemon then frees no slot, and refuses the next session, until that
        process is dead.

        Does nothing the second time. In a forked child it only closes the child's copies of descriptors.
        """
        super().close()
        if os.getpid() == self._process_id:
            self._channel.posted.wait()  # what came before the goodbye's reply, and failures to be logged

    def _described(self) -> str:
        return f"{super()._described()}, slots={self.slots}"

    def _go_on(self, channel: SessionChannel, welcome: Welcome) -> None:
        """Replace the session and its connection by those that the next daemon granted."""
        old, beats = self._channel, self._heartbeat
        if beats is not None:
            beats.close()
        old.close()
        channel.misses, channel.named_fence, channel.posted = old.misses, old.named_fence, old.posted
        channel.tells_tokens = tells_tokens(welcome)
        self._channel = channel
        self.session = SessionGrant(id=welcome.session, token=welcome.token, run_dir=self.session.run_dir)
        self.epoch, self._daemon_epoch = welcome.epoch, welcome.daemon_epoch
        if beats is not None:
            self._heartbeat = self._new_heartbeat(welcome, welcome.generation)
            self._heartbeat.signalled = self._signalled
            self.start_heartbeats()
        if self._reserve is not None:
            self._reserve.refill()

    def _hold_reserve(self, blocks: int) -> None:
        if blocks:
            tokens = (blocks - 1) * self.layout.block_size
            name = f"{RESERVE_REQUEST_PREFIX}session {self.session.id}"
            prompt = self.chain((0,))
            granted = Granted(self._chain_kind, {}, None)
            asked = acquiring(Lease, self._channel, name, prompt, granted, reserve_tokens=tokens, cache="nothing")
            keeper = complete(asked)
            self._reserve = Reserve(keeper) if keeper.granted else None


class Client(ClientSteps, BlockingSession, ReportCalls, PrefetchCalls):
    """An engine's session on one replica's pool. A context manager. For one thread at a time.

    A call, or `close`, while another thread is inside a call raises `RuntimeError`, and changes nothing.

    Close it. If it is only dropped, its heartbeats end, but the session is not closed, because the engine may still
    write: the pool is then busy until the session has expired.

    A forked child cannot use it: there its methods raise `RuntimeError`. The parent's client is not affected.

    If the daemon is killed, the pool outlives it. The engine continues with the slots of its leases, and takes slots of
    its reserve for new requests; when the next daemon is up, `rejoin` continues the session with all of them.

    Attributes:
        session: what shard processes need for `map_pool`.
        layout: shape of a block.
        slots: number of slots in the pool, the same on every shard.
        epoch: epoch of the pool.
        namespace: 32 bytes, the root of every chain of keys.
    """

    _channel: SessionChannel

    def __init__(self, channel: SessionChannel, welcome: Welcome, *, heartbeat: bool) -> None:
        """Use `connect`."""
        super().__init__(channel, welcome, heartbeat=heartbeat)
        self._batches: weakref.WeakSet[CallBatch] = weakref.WeakSet()

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
        wait_s: float = 0.0,
    ) -> Self:
        """Open a session on a replica's pool.

        Args:
            run_dir: directory of the daemon's sockets; default: `default_run_dir`.
            replica: name of a replica in the daemon's configuration.
            deadline_ms: limit for one call, and for each step of this one.
            failures: "raise" raises typed errors. "miss" makes every failure of the daemon look like an empty cache:
                `match` returns 0, `acquire` a lease that is not granted, and the other methods of a lease do nothing.
                `failure_count` counts the failures, `last_failure` and `Lease.reason` say why; the first of each kind
                is logged. After a missed deadline, calls are misses at once until the daemon replies again. `connect`
                always raises.
            layout: the layout that the engine was built for; the daemon refuses another one.
            heartbeat: send heartbeats from a thread. Without them the session expires; for tests and short tools.
            reserve_blocks: slots to hold in reserve. While the daemon is away, `acquire` and `allocate` take slots from
                the reserve, and everything is computed. At all other times the pool is smaller by these slots.
            wait_s: how long to wait for a daemon that is not there, does not reply, or is not ready: it starts workers
                again, drains, or clears the replica, or another client has the pool, also one of this process. What
                waiting does not mend is raised at once.

        Raises:
            ValueError: `failures` is neither "raise" nor "miss", `deadline_ms` is less than 1 or more than 24 days, or
                `wait_s` or `reserve_blocks` negative.
            NoCapacity: there are fewer free slots than `reserve_blocks`.
            DaemonUnreachable, DeadlineExceeded: there is no daemon, or it does not reply.
            Refused: the replica is unknown; its layout is another one; another session holds the pool, maybe one of
                this process that was not closed; or the socket in `run_dir` belongs to neither root nor this user.
            RequestError: see `kvcached_client.errors`.
        """
        attempt = partial(
            cls.open,
            run_dir,
            replica=replica,
            deadline_ms=deadline_ms,
            failures=failures,
            layout=layout,
            heartbeat=heartbeat,
            reserve_blocks=reserve_blocks,
        )
        return with_patience(attempt, wait_s)

    def match(self, chain: KeyChain, *, full: bool = False) -> int:
        """How many leading blocks are cached, in the pool or in host memory. Reserves nothing.

        The last token is left to compute, so a prompt that is cached to its end counts one block less, unless `full`.
        `acquire` may load fewer of the blocks in host memory: the daemon's configuration has a threshold and a quota.

        Raises:
            RequestError, TransportError: see `kvcached_client.errors`.
        """
        return complete(self.matching(chain, full=full))

    def acquire(
        self,
        request: str,
        chain: KeyChain,
        *,
        prompt_tokens: int | None = None,
        reserve_tokens: int = 0,
        cache: CachePolicy = "all",
        full: bool = False,
        priority: int = 0,
        tenant: str = "",
    ) -> Lease:
        """Lock the cached blocks of a prompt against eviction, and get slots for the rest of the prompt.

        Cached blocks that are only in host memory may still be loading when it returns: see `Lease.is_loading`.

        After a missed deadline, a call with the same `request` gets the same lease, or another one in its place; at any
        other time it is refused until that lease is released. If copies in flight are about to free slots, it waits for
        them, within its deadline.

        If the prompt begins with one that this session has acquired, as the next turn of a conversation does, only the
        keys behind the earlier prompt are sent.

        Args:
            request: the engine's own id of the request, at most 256 characters.
            chain: the prompt: the tokens that the chain holds now. Extend the chain with the output later.
            prompt_tokens: how many of them are the prompt, if the chain holds output as well, as after a preemption.
                Only `cache` looks at it.
            reserve_tokens: output tokens that get slots from the start.
            cache: which blocks `commit` and `finish` make findable: "all", "prompt" (none with output), "nothing".
            full: also use the block with the prompt's last token if it is cached; nothing is left to compute then.
            priority: -8 to 7; blocks that only requests of lower priority use are evicted first.
            tenant: whose quota of the host pool the blocks count against, at most 64 characters; "" for nobody's. Give
                each tenant's prompts a salt: blocks that tenants share belong to the one that came first.

        Raises:
            NoCapacity: no slot is free and nothing can be evicted; nothing was taken.
            BadRequest: the prompt is longer than a message may be, or is empty or no chain (also with "miss").
            RequestError, TransportError: see `kvcached_client.errors`.
        """
        options = LeaseOptions(
            prompt_tokens=prompt_tokens, reserve_tokens=reserve_tokens, cache=cache, full=full, priority=priority,
            tenant=tenant,
        )  # fmt: skip
        return complete(self._acquiring(request, chain, **options))

    def batch(self) -> CallBatch:
        """Begin a batch: the calls of a scheduler step in one round trip. Use it in a ``with`` statement."""
        batch = CallBatch(self._acquiring)
        self._batches.add(batch)
        return batch

    def settle(self) -> None:
        """Wait for the replies to all calls with ``wait=False``; raise the first of their errors since the last time.

        An engine need not call it: replies are taken by later calls, and errors are logged.

        Raises:
            RequestError, TransportError: see `kvcached_client.errors`.
        """
        self._channel.settle()

    def rejoin(self) -> None:
        """Continue the session and all its leases with the next daemon, after this client's daemon was killed.

        Leases keep their slots, and their committed blocks are findable again. For blocks that were still loading,
        `Lease.wait_loaded` behaves as after a failed load. `session`, `epoch` and the ids of the leases are new. Shard
        processes keep using the memory that they have mapped; to wait for loads, they map it again with the new
        `session`. Call it when `is_alive` is False. If it raises, the client is unchanged, and you may call it again.

        While the session is alive and its daemon is there, there is nothing to continue: it does nothing.

        Raises:
            DaemonUnreachable, DeadlineExceeded: no daemon is up yet, or it did not answer in time: call it again.
            Stale: the pool or the namespace no longer exists: close the client and connect again.
            RequestError: see `kvcached_client.errors`; close the client and connect again.
        """
        if self._channel.is_connected() and self.is_alive:
            return
        for batch in self._batches:
            batch.wait()
        self.rejoin_next()

    def _acquiring(self, request: str, chain: KeyChain, **options: Unpack[LeaseOptions]) -> Steps[Lease]:
        return self.acquiring(Lease, request, chain, **options)
