"""Engines in offload mode at a service without sockets."""

from __future__ import annotations

from array import array
from typing import Any

from kvcached.core.messages import Ticked
from kvcached.core.slots.states import SlotState
from kvcached_client.protocol import engine as wire
from kvcached_client.protocol.attach import JoinedHost
from kvcached_client.protocol.offload import CopyKind
from kvcached_client.types import SessionId, ShardIndex, unpack_ranges
from tests.service.office import EPOCH, ONE, FakePeer, Office, key_chain

INSTANCE, OTHER_INSTANCE = b"i" * 16, b"j" * 16
BLOCK_BYTES = 4096


class OffloadOffice(Office):
    """A service with one replica, and a host pool of four slabs of eight blocks, which engines may use."""

    def __init__(self, **parts: Any) -> None:
        super().__init__("a", host_slabs=4, spaces=2, **parts)

    def hello_offload(self, process: FakePeer, *, version: int = 1, **fields: Any) -> wire.HelloOffload:
        """The hello of an engine of two shards."""
        declared: dict[str, Any] = {
            "engine": "engine 1.0",
            "instance": INSTANCE,
            "label": "tiny",
            "keyspace": b"k" * 32,
            "block_size": 4,
            "shards": 2,
            "block_bytes": BLOCK_BYTES,
            "fingerprint": b"f" * 16,
        }
        return wire.HelloOffload(
            id=self.next_id(),
            version_min=version,
            version_max=version,
            member=self.service.identify(process).member,
            **{**declared, **fields},
        )

    def attach(self, process: FakePeer, *, peer: bytes = ONE, **fields: Any) -> wire.WelcomeOffload:
        """A session for a process."""
        return self.expect(wire.WelcomeOffload, self.hello_offload(process, **fields), peer=peer)

    def join(
        self, process: FakePeer, welcome: wire.WelcomeOffload, shard: int = 0, *, token: bytes = b""
    ) -> JoinedHost:
        """Its shard process joins."""
        session = SessionId(welcome.session)
        joined, _ = self.service.join(process, session, token or welcome.token, ShardIndex(shard))
        assert isinstance(joined, JoinedHost)
        return joined

    def acquire_blocks(self, blocks: int, *, seed: int = 0, request: str = "r", peer: bytes = ONE) -> wire.Held:
        """A lease on a prompt of so many blocks."""
        return self.expect(
            wire.Held, self.acquire(key_chain(blocks, seed), request), key_chain(blocks, seed), peer=peer
        )

    def prepare_store(self, lease: int, start: int = 0) -> wire.PrepareStore:
        return wire.PrepareStore(id=self.next_id(), epoch=EPOCH, lease=lease, start=start)

    def prepare_load(self, lease: int, blocks: int, start: int = 0) -> wire.PrepareLoad:
        return wire.PrepareLoad(id=self.next_id(), epoch=EPOCH, lease=lease, start=start, blocks=blocks)

    def storing(self, blocks: int, *, seed: int = 0, peer: bytes = ONE) -> wire.StorePrepared:
        """A store of a prompt's blocks that no shard has carried out."""
        held = self.acquire_blocks(blocks, seed=seed, request=f"store {self._request}", peer=peer)
        keys = key_chain(blocks, seed)[16 * held.hit :]
        return self.expect(wire.StorePrepared, self.prepare_store(held.lease, held.hit), keys, peer=peer)

    def transfer_done(
        self, welcome: wire.WelcomeOffload, transfer: int, shard: int, *, kind: CopyKind = "store"
    ) -> wire.TransferDone:
        return wire.TransferDone(
            id=self.next_id(),
            session=welcome.session,
            token=welcome.token,
            kind=kind,
            transfer=transfer,
            shard=shard,
        )

    def store_blocks(self, welcome: wire.WelcomeOffload, blocks: int, *, seed: int = 0, peer: bytes = ONE) -> None:
        """Store a prompt's blocks, as far as they are not there."""
        plan = self.storing(blocks, seed=seed, peer=peer)
        for shard in range(2):
            self.expect(wire.Settled, self.transfer_done(welcome, plan.transfer, shard), peer=bytes([shard]))

    def hit(self, blocks: int, *, seed: int = 0, peer: bytes = ONE) -> int:
        """How many of a prompt's blocks are found."""
        match = wire.Match(id=self.next_id(), epoch=EPOCH, tokens=4 * blocks, full=True)
        matched = self.expect(wire.Matched, match, key_chain(blocks, seed), peer=peer)
        assert matched.device == 0
        return matched.host

    def host_states(self) -> dict[str, int]:
        """Host slots of all engines' namespaces by state, those that there are none of left out."""
        counts = [tree.host.counts for tree in self.cache.offload.namespaces.trees if tree.host is not None]
        states = (SlotState.FREE, SlotState.FILLING, SlotState.CACHED, SlotState.QUARANTINED)
        return {
            state.name.lower(): sum(each[state] for each in counts)
            for state in states
            if any(each[state] for each in counts)
        }

    def let_expire(self) -> None:
        """Nobody is heard for longer than the TTL."""
        for now_ms in (1, 500, 1000, 1001):
            self.service.on_event(Ticked(now_ms))

    def die(self, process: FakePeer) -> None:
        """A process is dead, and the daemon sees it."""
        process.dead = True
        self.service.peer_lost(process)


def slots_in(frame: bytes) -> list[int]:
    """A frame of ranges as single slots."""
    return [slot for first, count in unpack_ranges(frame) for slot in range(first, first + count)]


def indices(*blocks: int) -> bytes:
    """A frame of block indices."""
    return array("i", blocks).tobytes()
