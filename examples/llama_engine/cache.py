"""What the scheduler needs of a cache: in managed mode that is a `ManagedCache`, else an `AttachedCache`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from examples.llama_engine.storage import Fetch
from kvcached_client.blocks.layout import Layout
from kvcached_client.keys import KeyChain, Tokens
from kvcached_client.lease import CachePolicy
from kvcached_client.protocol.engine import LoadTicket


class BlockLease(Protocol):
    """The blocks of one request, cached ones first. `kvcached_client.Lease` says what each part means."""

    @property
    def hit_tokens(self) -> int:
        """Leading tokens that need no computing, if what is loading arrives."""

    @property
    def ready_blocks(self) -> int:
        """Leading blocks that can be read now."""

    @property
    def is_loading(self) -> bool:
        """Whether the hit may still turn out shorter."""

    @property
    def loads(self) -> tuple[LoadTicket, ...]:
        """What shards wait for, layer by layer, while it is loading; nothing if they cannot: then it is waited for."""

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """Where each block is."""

    def wait_loaded(self) -> int:
        """Return `hit_tokens` when it can be relied on."""

    def allocate(self, tokens: int) -> None:
        """Have blocks for so many tokens. Raises NoCapacity."""

    def commit(self, computed_tokens: int) -> None:
        """The full blocks among these tokens are computed: others may find them."""

    def finish(self, computed_tokens: int) -> None:
        """Commit, and release."""

    def release(self) -> None:
        """Give all blocks back."""


class Cache(Protocol):
    """Where leases come from."""

    @property
    def layout(self) -> Layout:
        """Of a block."""

    def chain(self, tokens: Tokens = ()) -> KeyChain:
        """The keys of a request's blocks."""

    def fetch(self, prompt: Tokens, tokens_per_s: float) -> Fetch | None:
        """Have blocks of a prompt brought from storage, where the engine does not compute them sooner at that rate."""

    def acquire(self, request: str, chain: KeyChain, *, cache: CachePolicy = "all") -> BlockLease:
        """Blocks for a prompt. Raises NoCapacity."""

    def together(self) -> AbstractContextManager[None]:
        """For a ``with`` statement: commits and finishes in it may share a round trip, which ends with it."""

    def go_on(self) -> bool:
        """Between two steps: go on with a daemon that was started anew, if there is one. Whether there was."""

    def await_daemon(self) -> bool:
        """Where blocks are short because the daemon is away, wait for it. False: it is not away."""

    def close(self) -> None:
        """Leave the daemon. No shard is left that could copy."""
