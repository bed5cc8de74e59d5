"""A stand-in for daemon and SDK in one process: a prefix dictionary, a free list, and plain memory as the pool."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from typing import cast

import numpy as np
import numpy.typing as npt

from kvcached_client.blocks.layout import Layout
from kvcached_client.blocks.progress import ProgressReader
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.keys import KeyChain
from kvcached_client.pool import MappedPool
from kvcached_client.protocol.attach import Joined
from kvcached_client.protocol.engine import LoadTicket
from kvcached_client.transport.attach import AttachConnection, JoinedMemory
from kvcached_client.types import KEY_SIZE_BYTES
from tests.engine.fake_host import FakeHost


def fake_pool(layout: Layout, slots: int, shard: int = 0) -> MappedPool:
    """The SDK's own views over memory that no daemon knows of."""
    size_bytes = layout.pool_bytes(slots)
    joined = Joined(kind="memfd", shard=shard, epoch=1, layout=layout, slots=slots, pool_bytes=size_bytes)
    with socket.socket() as closed:
        connection = AttachConnection(closed)
    memory = JoinedMemory(connection, joined, pool=-1, progress=-1, events=())
    nobody_waits = cast("ProgressReader", None)
    return MappedPool(memory, (ctypes.c_ubyte * size_bytes)(), nobody_waits)


class FakeClient:
    """What the scheduler uses of `kvcached_client.Client`. Unpinned blocks are evicted last committed first.

    With a `host`, what is evicted goes there, and comes back by a load.
    """

    def __init__(self, layout: Layout, slots: int, host: FakeHost | None = None) -> None:
        self.layout = layout
        self.slots = slots
        self.host = host or FakeHost()
        self.has_host = host is not None
        self.free = list(range(slots))
        self.cached: dict[bytes, int] = {}  # key → slot, in order of commit
        self.loading: dict[int, LoadTicket] = {}  # slot → the load that fills it
        self.pins: dict[int, int] = {}
        self.calls: list[str] = []
        self.full_at_wait = False  # the next `wait_loaded` finds no replacement slots

    def chain(self, tokens: Sequence[int] = ()) -> KeyChain:
        return KeyChain(bytes(32), self.layout.block_size, tokens)

    def fetch(self, prompt: Sequence[int], tokens_per_s: float) -> None:
        return None  # it has no storage

    def acquire(self, request: str, chain: KeyChain, *, cache: str = "all") -> FakeLease:
        self.calls.append(f"acquire {request}")
        keys = split_keys(chain, 0, (chain.token_count - 1) // chain.block_size)
        hit = [self.cached[key] for key in leading(keys, self.cached)]
        stored = leading(keys[len(hit) :], self.host.blocks)
        for slot in hit:
            self.pin(slot)
        try:
            taken = self.take(-(-chain.token_count // chain.block_size) - len(hit))
        except Exception:
            for slot in hit:
                self.unpin(slot)
            raise
        arriving, exclusive = taken[: len(stored)], taken[len(stored) :]
        if stored:
            self._load(stored, arriving)
        return FakeLease(self, request, chain, hit + arriving, exclusive, cache)

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def go_on(self) -> bool:
        return False  # it is always there

    def await_daemon(self) -> bool:
        return False

    def _load(self, keys: list[bytes], slots: list[int]) -> None:
        load = self.host.start(keys, slots)
        for key, slot in zip(keys, slots, strict=True):
            self.pin(slot)
            self.cached[key] = slot
            self.loading[slot] = load.ticket

    def settle(self, transfer: int) -> None:
        """End a load: what did not arrive is forgotten, and its slots are free when nobody holds them."""
        load = self.host.finish(transfer)
        for index, (key, slot) in enumerate(zip(load.keys, load.slots, strict=True)):
            if self.loading.get(slot) != load.ticket:
                continue
            del self.loading[slot]
            if index >= load.arriving:
                del self.host.blocks[key], self.cached[key]
                if not self.pins[slot]:
                    self.free.append(slot)

    def take(self, count: int) -> list[int]:
        evictable = [key for key, slot in self.cached.items() if not self.pins.get(slot) and slot not in self.loading]
        if count > len(self.free) + len(evictable):
            raise request_error(ErrorCode.NO_CAPACITY, f"{count} slots wanted", "release, or try later")
        while len(self.free) < count:
            key = evictable.pop()
            slot = self.cached.pop(key)
            if self.has_host:
                self.host.store(key, slot)
            self.free.append(slot)
        return [self.free.pop(0) for _ in range(count)]

    def pin(self, slot: int) -> None:
        self.pins[slot] = self.pins.get(slot, 0) + 1

    def unpin(self, slot: int) -> None:
        self.pins[slot] -= 1
        if not self.pins[slot] and slot not in self.cached.values():
            self.free.append(slot)

    def check_all_returned(self) -> None:
        """Every slot is free or cached, and none is pinned."""
        assert sorted([*self.free, *self.cached.values()]) == list(range(self.slots))
        assert not any(self.pins.values())


class FakeLease:
    """What the scheduler uses of `kvcached_client.Lease`."""

    def __init__(
        self, client: FakeClient, request: str, chain: KeyChain, hit: list[int], exclusive: list[int], cache: str
    ) -> None:
        self._client = client
        self._request = request
        self._chain = chain
        self._table = hit + exclusive
        self._pinned = list(hit)
        self._depth = len(hit)
        self._prompt_blocks = chain.block_count
        self._cache = cache
        self.hit_blocks = len(hit)
        self.ready_blocks = len(list(takewhile(lambda slot: slot not in client.loading, hit)))
        self.loads = tuple({client.loading[slot]: None for slot in hit if slot in client.loading})

    @property
    def hit_tokens(self) -> int:
        return self.hit_blocks * self._chain.block_size

    @property
    def is_loading(self) -> bool:
        return bool(self.loads)

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        return np.asarray(self._table, dtype=np.int32)

    def wait_loaded(self) -> int:
        if not self.loads:
            return self.hit_tokens
        self._client.calls.append(f"load {self._request}")
        for ticket in self.loads:
            self._client.settle(ticket.transfer)
        present = set(self._client.cached.values())
        arrived = len(list(takewhile(present.__contains__, self._pinned)))
        if self._client.full_at_wait:
            self._client.full_at_wait = False
            raise request_error(ErrorCode.NO_CAPACITY, "no slots to compute in", "release, or try later")
        replacements = self._client.take(self.hit_blocks - arrived)
        for slot in self._pinned[arrived:]:
            self._client.unpin(slot)
        self._table[arrived : self.hit_blocks] = replacements
        del self._pinned[arrived:]
        self.hit_blocks = self._depth = arrived
        self.loads = ()
        return self.hit_tokens

    def allocate(self, tokens: int) -> None:
        missing = -(-tokens // self._chain.block_size) - len(self._table)
        if missing > 0:
            self._client.calls.append(f"allocate {self._request} {tokens}")
            self._table += self._client.take(missing)

    def commit(self, computed_tokens: int) -> None:
        if self.is_loading:
            raise request_error(ErrorCode.STILL_LOADING, self._request, "wait_loaded first")
        cap = {"all": self._chain.block_count, "prompt": self._prompt_blocks, "nothing": 0}[self._cache]
        end = max(self._depth, min(computed_tokens // self._chain.block_size, cap))
        if end > self._depth:
            self._client.calls.append(f"commit {self._request} {end}")
        for index, key in enumerate(split_keys(self._chain, self._depth, end), self._depth):
            if key not in self._client.cached:
                self._client.cached[key] = self._table[index]
                self._client.pin(self._table[index])
                self._pinned.append(self._table[index])
        self._depth = end

    def finish(self, computed_tokens: int) -> None:
        self.commit(computed_tokens)
        self.release()

    def release(self) -> None:
        self._client.calls.append(f"release {self._request}")
        self._client.free += [slot for slot in self._table if slot not in self._pinned]
        for slot in self._pinned:
            self._client.unpin(slot)


def leading(keys: list[bytes], known: Container[bytes]) -> list[bytes]:
    """The keys before the first that is not known."""
    return list(takewhile(known.__contains__, keys))


def split_keys(chain: KeyChain, start: int, stop: int) -> list[bytes]:
    """The keys of the blocks [start, stop), one by one."""
    packed = chain.key_range(start, stop)
    return [packed[at : at + KEY_SIZE_BYTES] for at in range(0, len(packed), KEY_SIZE_BYTES)]
