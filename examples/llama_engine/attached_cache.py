"""The cache of an engine that has memory of its own: its blocks, and what the daemon's host pool does for them.

Life of a request, and what happens to its blocks::

    fetch        nothing                           daemon: prefetch; storage has blocks that the host pool lacks
    acquire      blocks of its own for the prompt   daemon: acquire, prepare_load; the shards copy the hit into them
    wait_loaded  all shards have copied              what did not arrive, or was damaged, is computed
    commit       blocks are full                     daemon: prepare_store; the shards copy what it lacks
    release      blocks are free when no copy needs them any more

The daemon may be away at every step. Then nothing is hit and nothing is stored, and the request is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np
import numpy.typing as npt

from examples.llama_engine.block_pool import BlockPool
from examples.llama_engine.config import AttachedSettings, EngineSettings, LlamaConfig, keyspace
from examples.llama_engine.copies import Copies
from examples.llama_engine.copy_pipes import CopyPipes
from examples.llama_engine.daemon_link import DaemonLink
from examples.llama_engine.messages import JoinSession, OwnBlocks
from examples.llama_engine.shard_group import ShardGroup
from examples.llama_engine.storage import DEADLINE_MS, Fetch, Storage
from kvcached_client.blocks.layout import Layout
from kvcached_client.keys import KeyChain, Tokens
from kvcached_client.lease import CachePolicy
from kvcached_client.offload import OffloadClient, OffloadLayout, new_instance
from kvcached_client.prefetch import PendingPrefetch
from kvcached_client.protocol.engine import LoadTicket
from kvcached_client.types import LeaseId


@dataclass(frozen=True, slots=True)
class AttachedCache:
    """Used by the scheduler as `Client` is."""

    layout: Layout
    root: bytes  #: of all keys
    pool: BlockPool
    copies: Copies
    link: DaemonLink
    storage: Storage

    @classmethod
    def over(
        cls,
        pipes: CopyPipes,
        connect: Callable[..., OffloadClient],
        layout: Layout,
        root: bytes,
        settings: AttachedSettings,
    ) -> Self:
        """The cache of shards that have made their blocks. Connects, if there is a daemon."""
        pool = BlockPool(settings.blocks)
        link = DaemonLink(
            lambda: connect(keyspace=root, deadline_ms=settings.deadline_ms),
            lambda client: pipes.order(JoinSession(client.session, settings.deadline_ms)),
        )
        link.reconnect()
        storage = Storage(partial(KeyChain, root, layout.block_size), partial(_begin_fetch, link))
        return cls(layout, root, pool, Copies(pipes, pool), link, storage)

    def chain(self, tokens: Tokens = ()) -> KeyChain:
        """Keys that do not depend on a daemon: there may be none, and another one later."""
        return KeyChain(self.root, self.layout.block_size, tokens)

    def fetch(self, prompt: Tokens, tokens_per_s: float) -> Fetch | None:
        """Have blocks of a prompt brought from storage."""
        return self.storage.fetch(prompt, tokens_per_s)

    def acquire(self, request: str, chain: KeyChain, *, cache: CachePolicy = "all") -> AttachedLease:
        """Blocks for a prompt; those that the host pool has are on their way when it returns.

        Raises:
            NoCapacity: there are not enough free blocks.
        """
        lease = AttachedLease(self, chain, cache)
        lease.load(request)
        return lease

    def take(self, count: int) -> list[int]:
        """Free blocks; copies that hold some are waited for.

        Raises:
            NoCapacity: requests hold too many.
        """
        while self.pool.free_blocks < count and self.copies:
            self.copies.collect(wait=True)
        return self.pool.take(count)

    def drain(self) -> None:
        """Return when no copy is under way."""
        while self.copies:
            self.copies.collect(wait=True)

    def together(self) -> AbstractContextManager[None]:
        """Nothing to put together: stores are begun without a wait."""
        return nullcontext()

    def go_on(self) -> bool:
        """No: the next request looks for the daemon."""
        return False

    def await_daemon(self) -> bool:
        """No: the blocks are the engine's own."""
        return False

    def close(self) -> None:
        """End the session."""
        self.link.close()


class AttachedLease:
    """A request's blocks. `BlockLease` says what the scheduler does with it."""

    #: Nothing that shards could wait for layer by layer: a request is computed when its hit is there.
    loads: tuple[LoadTicket, ...] = ()

    def __init__(self, cache: AttachedCache, chain: KeyChain, policy: CachePolicy) -> None:
        self.hit_blocks = 0
        self._cache = cache
        self._chain = chain
        self._block_size = cache.layout.block_size
        self._cacheable_blocks = {"all": None, "prompt": chain.block_count, "nothing": 0}[policy]
        self._table: list[int] = []
        self._is_loading = False
        self._session = 0
        self._lease: LeaseId | None = None  #: the daemon's, in that session
        self._depth = 0  #: of that: where its next store starts
        self._offered = 0  #: blocks that the daemon was asked to store; those it had no room for wait for the next one
        self.allocate(chain.token_count)

    @property
    def hit_tokens(self) -> int:
        """Leading tokens that need no computing, if what is loading arrives."""
        return self.hit_blocks * self._block_size

    @property
    def ready_blocks(self) -> int:
        """None: the engine keeps nothing of earlier requests in its own blocks."""
        return 0

    @property
    def is_loading(self) -> bool:
        """Whether the hit is still on its way. Hears what the shards have said meanwhile."""
        if self._is_loading:
            self._cache.copies.collect(wait=False)
        return self._is_loading

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """Position of a block in the request → the engine's block."""
        return np.asarray(self._table, np.int32)

    def load(self, request: str) -> None:
        """Ask for what is cached of the prompt, and have it copied."""
        link, chain = self._cache.link, self._chain
        link.reconnect()
        self._session = link.session
        hold = link.ask(
            self._session, lambda client: client.acquire(request, chain.keys, chain.token_count, load_from=0)
        )
        if hold is None:
            return
        self._lease, self._depth = hold.lease, hold.hit
        if not hold.hit:
            return
        plan = hold.load
        if plan is None:
            plan = link.ask(self._session, lambda client: client.prepare_load(hold.lease, 0, hold.hit))
        if plan is not None:
            self.hit_blocks, self._is_loading = hold.hit, True
            self._cache.copies.load(plan, chain, self._table, self._on_loaded)

    def wait_loaded(self) -> int:
        """Return `hit_tokens` when the copies are over. The blocks that did not arrive are there to compute into."""
        while self._is_loading:
            self._cache.copies.collect(wait=True)
        return self.hit_tokens

    def allocate(self, tokens: int) -> None:
        """Have blocks for so many tokens. Raises NoCapacity."""
        missing = -(-tokens // self._block_size) - len(self._table)
        if missing > 0:
            self._table += self._cache.take(missing)

    def commit(self, computed_tokens: int) -> None:
        """Have the full blocks among these tokens copied to the host pool, as far as it lacks them."""
        end = computed_tokens // self._block_size
        if self._cacheable_blocks is not None:
            end = min(end, self._cacheable_blocks)
        if self._lease is None or end <= max(self._depth, self._offered):
            return
        self._offered = end
        lease, depth, keys = self._lease, self._depth, self._chain.key_range(self._depth, end)
        plan = self._cache.link.ask(self._session, lambda client: client.prepare_store(lease, depth, keys))
        if plan is None:
            return
        self._depth = plan.depth
        if plan.transfer:
            self._cache.copies.store(plan, self._chain, self._table)

    def finish(self, computed_tokens: int) -> None:
        """Commit, and release."""
        self.commit(computed_tokens)
        self.release()

    def release(self) -> None:
        """Give all blocks back. Those that are being copied are free when that is over."""
        self._cache.pool.drop(self._table)
        if self._lease is not None:
            lease = self._lease
            self._cache.link.ask(self._session, lambda client: client.release(lease))

    def _on_loaded(self, bad: set[int]) -> None:
        self._is_loading = False
        self.hit_blocks = min(bad, default=self.hit_blocks)


def _begin_fetch(link: DaemonLink, chain: KeyChain, tokens_per_s: float) -> PendingPrefetch | None:
    def begin(client: OffloadClient) -> PendingPrefetch:
        return client.begin_prefetch(
            chain.keys, chain.token_count, deadline_ms=DEADLINE_MS, prefill_tokens_per_s=tokens_per_s
        )

    link.reconnect()
    return link.ask(link.session, begin)


def open_attached(settings: EngineSettings, config: LlamaConfig) -> tuple[AttachedCache, ShardGroup]:
    """Start shards with blocks of their own, and connect to the daemon, if there is one.

    Raises:
        ModelError: the model does not split over the shards.
        ShardDied: a shard could not start.
    """
    own = settings.attached or AttachedSettings()
    layout = config.layout(own.block_size, settings.tp)
    shards = ShardGroup(settings, OwnBlocks(layout=layout, blocks=own.blocks))
    root = keyspace(config, settings, layout)
    connect = partial(
        OffloadClient.connect,
        settings.run_dir,
        engine="llama_engine",
        instance=new_instance(),
        label=settings.model_dir.absolute().name,
        layout=OffloadLayout(
            own.block_size,
            settings.tp,
            shards.ready[0].block_bytes,
            shards.ready[0].fingerprint,
            replicated=layout.replicated,
        ),
    )
    return AttachedCache.over(shards.copies, connect, layout, root, own), shards
