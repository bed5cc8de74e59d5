"""Managed mode on the scheduler's side: the daemon's client, and what is done while the daemon is away.

A daemon that is killed comes back to the same pool. Until then leases keep their slots and new requests take those of
the reserve; nothing is found and nothing is committed. Then the client says what it holds, and all goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from examples.llama_engine.storage import DEADLINE_MS, Fetch, Storage
from kvcached_client import Client, DaemonUnreachable, DeadlineExceeded, KeyChain, Lease
from kvcached_client.batch import CallBatch
from kvcached_client.blocks.layout import Layout
from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.keys import Tokens
from kvcached_client.lease import CachePolicy
from kvcached_client.prefetch import PendingPrefetch
from kvcached_client.protocol.engine import LoadTicket
from kvcached_client.transport.attach import SessionGrant

#: Longer than a service manager takes to start a daemon with a full host pool.
PATIENCE_S = 60.0
#: Between two looks for the daemon, where nothing else is to be done.
_PAUSE_S = 0.02

_log = logging.getLogger("llama_engine")


class ManagedCache:
    """Leases on the daemon's pool.

    Args:
        client: of the daemon.
        on_rejoined: told of the new session whenever a daemon was started anew: shards wait for loads in it.
    """

    def __init__(self, client: Client, on_rejoined: Callable[[SessionGrant], None]) -> None:
        self._client = client
        self._on_rejoined = on_rejoined
        self._batch: CallBatch | None = None  #: while calls are put together
        self._storage = Storage(self.chain, self._begin_fetch)

    @property
    def layout(self) -> Layout:
        """Of a block."""
        return self._client.layout

    def chain(self, tokens: Tokens = ()) -> KeyChain:
        """The keys of a request's blocks."""
        return self._client.chain(tokens)

    def fetch(self, prompt: Tokens, tokens_per_s: float) -> Fetch | None:
        """Have blocks of a prompt brought from storage."""
        return self._storage.fetch(prompt, tokens_per_s)

    def _begin_fetch(self, chain: KeyChain, tokens_per_s: float) -> PendingPrefetch | None:
        if not self._client.is_alive:
            return None
        return self._client.begin_prefetch(chain, deadline_ms=DEADLINE_MS, prefill_tokens_per_s=tokens_per_s)

    def acquire(self, request: str, chain: KeyChain, *, cache: CachePolicy = "all") -> ManagedLease:
        """Blocks for a prompt: of the reserve, and none of them cached, while the daemon is away. Raises NoCapacity."""
        try:
            return ManagedLease(self, self._client.acquire(request, chain, cache=cache))
        except DaemonUnreachable as error:
            raise _nothing_left(error) from error

    @contextmanager
    def together(self) -> Iterator[None]:
        """Put the commits and finishes in a ``with`` statement into one batch."""
        try:
            with self._client.batch() as self._batch:
                yield
        except DaemonUnreachable as error:
            _log.info("not cached: %s", error)
        finally:
            self._batch = None

    def commit(self, lease: Lease, computed_tokens: int) -> None:
        """Commit, now or in the batch."""
        if self._batch is None:
            lease.commit(computed_tokens)
        else:
            self._batch.commit(lease, computed_tokens)

    def finish(self, lease: Lease, computed_tokens: int) -> None:
        """Commit and release, now or in the batch."""
        if self._batch is None:
            lease.finish(computed_tokens)
        else:
            self._batch.finish(lease, computed_tokens)

    def go_on(self) -> bool:
        """Between two steps: go on with a daemon that was started anew, if it is there. Whether that was so.

        Raises:
            Stale: the pool is not there any more.
            RequestError: see `kvcached_client.errors`.
        """
        if self._client.is_alive:
            return False
        try:
            self._client.rejoin()
        except (DaemonUnreachable, DeadlineExceeded):
            return False  # not yet
        _log.info("the daemon is back, and has what the engine holds")
        self._on_rejoined(self._client.session)
        return True

    def await_daemon(self) -> bool:
        """Wait for a daemon that is away, and go on with it; False where it is there.

        Raises:
            DaemonUnreachable: it did not come back in time.
            Stale, RequestError: as `go_on`.
        """
        if self._client.is_alive:
            return False
        end_s = time.monotonic() + PATIENCE_S
        nobody_calls = threading.Event()  # a daemon that starts says so to its service manager alone
        while not self.go_on():
            if time.monotonic() > end_s:
                raise DaemonUnreachable(f"the daemon has been away for {PATIENCE_S:.0f} s; is it started again?")
            nobody_calls.wait(_PAUSE_S)
        return True

    def close(self) -> None:
        """End the session."""
        self._client.close()


class ManagedLease:
    """A lease that is as good as possible while the daemon is away. `BlockLease` says what each part means."""

    def __init__(self, cache: ManagedCache, lease: Lease) -> None:
        self._cache = cache
        self._lease = lease

    @property
    def hit_tokens(self) -> int:
        """Leading tokens that need no computing, if what is loading arrives."""
        return self._lease.hit_tokens

    @property
    def ready_blocks(self) -> int:
        """Leading blocks that can be read now."""
        return self._lease.ready_blocks

    @property
    def is_loading(self) -> bool:
        """Whether the hit may still turn out shorter."""
        return self._lease.is_loading

    @property
    def loads(self) -> tuple[LoadTicket, ...]:
        """What shards wait for, layer by layer."""
        return self._lease.loads

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """The slot of each block."""
        return self._lease.block_table

    def wait_loaded(self) -> int:
        """Return `hit_tokens` when it can be relied on. Raises NoCapacity where nobody can say: the daemon is away."""
        try:
            return self._lease.wait_loaded()
        except DaemonUnreachable as error:
            raise _nothing_left(error) from error

    def allocate(self, tokens: int) -> None:
        """Have slots for so many tokens. Raises NoCapacity."""
        try:
            self._lease.allocate(tokens)
        except DaemonUnreachable as error:
            raise _nothing_left(error) from error

    def commit(self, computed_tokens: int) -> None:
        """Others may find the full blocks among these tokens. While the daemon is away that is left for later."""
        try:
            self._cache.commit(self._lease, computed_tokens)
        except DaemonUnreachable as error:
            _log.debug("not committed yet: %s", error)

    def finish(self, computed_tokens: int) -> None:
        """Commit, and release; release alone while the daemon is away."""
        try:
            self._cache.finish(self._lease, computed_tokens)
        except DaemonUnreachable as error:
            _log.info("not cached: %s", error)
            self.release()

    def release(self) -> None:
        """Give all slots back. The next daemon is not told of them, if this one is away."""
        try:
            self._lease.release()
        except DaemonUnreachable as error:
            _log.debug("nobody to give slots back to: %s", error)


def _nothing_left(error: DaemonUnreachable) -> RequestError:
    return request_error(ErrorCode.NO_CAPACITY, f"the reserve has no slots left, and {error}", "wait for the daemon")
