"""Memory of the simulated machine: real bytes, and who may write which of them."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from kvcached.core.cache import Cache
from kvcached.core.index.tree import PrefixTree
from kvcached.core.slots.slots import DevicePool
from kvcached.memory.device_headers import DeviceHeaders, headers_bytes
from kvcached.memory.header_table import HeaderTable
from kvcached.memory.host_pool import MemoryIdentity
from kvcached_client.blocks.header import NAMESPACE_BYTES, HeaderKind
from kvcached_client.blocks.host_layout import HEADER_BYTES, HostGeometry
from tests.core.model import expand
from tests.simulation.process import Process
from tests.simulation.scheduler import Broken

#: Who has a right: what it is, ids, and in the end a shard. A shorter one stands for all that begin with it.
Holder = tuple[str | int, ...]
Span = tuple[int, int]


@lru_cache(maxsize=16_384)
def content(root: bytes, generation: int, times: int, key: bytes, shard: int, size: int) -> bytes:
    """The bytes that a block has to have: those of its key, of its namespace at its generation, on its shard.

    Where a generation begins anew after it was over, its blocks have to have other bytes: those of other weights.
    """
    return hashlib.shake_128(root + key + struct.pack("<QQB", generation, times, shard)).digest(size)


@dataclass(frozen=True)
class Shape:
    """How one namespace lies in the host pool."""

    root: bytes
    fingerprint: bytes
    geometry: HostGeometry
    #: How often each generation began anew after it was over, which none should.
    begun: Counter[int] = field(default_factory=Counter, compare=False)

    def header(self, slot: int, shard: int) -> Span:
        start = self.geometry.header_offset(slot, shard)
        return start, start + HEADER_BYTES

    def block(self, slot: int, shard: int) -> Span:
        start = self.geometry.block_offset(slot, shard)
        return start, start + self.geometry.block_bytes

    def spans(self, slots: Iterable[int], shard: int) -> list[Span]:
        """All that belongs to slots on a shard."""
        return [span for slot in slots for span in (self.header(slot, shard), self.block(slot, shard))]

    def kind(self, generation: int) -> HeaderKind:
        return HeaderKind(self.root[:NAMESPACE_BYTES], self.fingerprint, generation)

    def expected(self, generation: int, key: bytes, shard: int) -> bytes:
        return content(self.root, generation, self.begun[generation], key, shard, self.geometry.block_bytes)


@dataclass
class _Claim:
    holder: Holder
    spans: list[Span]
    writers: Sequence[Process]  #: who could use it; nobody if all are dead
    reads: bool  #: only to read, beside others who do


class Memory:
    """Bytes that several processes have mapped.

    A right to write begins when the daemon gives it to somebody, and ends with the writer's own word or its death. Two
    living writers never have a right to the same byte, nor has one while storage reads it.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.bytes = bytearray(size)
        #: Bytes that changed by themselves since they were written.
        self.rotten: list[Span] = []
        self._claims: list[_Claim] = []
        self._given_up: set[Holder] = set()

    def lose(self) -> None:
        """The machine is restarted: nothing is in it, and nobody has a right to it."""
        self.bytes[:] = bytes(len(self.bytes))
        self.rotten.clear()
        self._claims.clear()

    def claim(self, holder: Holder, spans: Iterable[Span], writers: Sequence[Process], *, reads: bool = False) -> None:
        """Somebody may write these bytes, or `reads` them, from now on, unless it has said before that it will not."""
        if any(holder[:length] in self._given_up for length in range(len(holder) + 1)):
            return
        wanted = list(spans)
        self._claims = [each for each in self._claims if not all(writer.dead for writer in each.writers)]
        for other in self._claims:
            is_apart = other.holder == holder or (reads and other.reads)
            if not is_apart and (span := _common(other.spans, wanted)) is not None:
                uses = "reads" if other.reads else "may write"
                raise Broken(f"{self.name}: bytes {span} were given to {holder}, and {other.holder} {uses} them yet")
        self._claims.append(_Claim(holder, wanted, writers, reads))

    def give_up(self, holder: Holder) -> None:
        """Somebody will not write any more, nor what an answer gives it that is still on its way."""
        self._given_up.add(holder)
        self._claims = [each for each in self._claims if each.holder[: len(holder)] != holder]

    def give_up_others(self, holder: Holder, names: Collection[str | int]) -> None:
        """Of those that begin with `holder`, only the ones with these names behind that will write any more."""
        for claim in list(self._claims):
            mine, rest = claim.holder[: len(holder)], claim.holder[len(holder) :]
            if mine == holder and rest[0] not in names:
                self.give_up(claim.holder)

    def is_claimed(self, holder: Holder, span: Span) -> bool:
        """Whether one of those that begin with `holder` may write some of these bytes."""
        mine = (claim for claim in self._claims if claim.holder[: len(holder)] == holder and not claim.reads)
        return any(_common(claim.spans, [span]) is not None for claim in mine)

    def give_up_spans(self, holder: Holder, spans: Iterable[Span]) -> None:
        """Somebody will not write these bytes any more."""
        given = set(spans)
        for claim in self._claims:
            if claim.holder[: len(holder)] == holder:
                claim.spans = [span for span in claim.spans if span not in given]

    def write(self, holder: Holder, start: int, data: bytes) -> None:
        """Write, with a right to do so."""
        end = start + len(data)
        self.touch(holder, (start, end))
        self.bytes[start:end] = data

    def touch(self, holder: Holder, span: Span) -> None:
        """Somebody is about to write these bytes.

        Raises:
            Broken: without a right to.
        """
        start, end = span
        mine = [each for claim in self._claims if claim.holder == holder and not claim.reads for each in claim.spans]
        if not any(first <= start and end <= last for first, last in mine):
            raise Broken(f"{self.name}: {holder} writes bytes {start} to {end} without a right to")
        self.rotten = [each for each in self.rotten if _common([each], [span]) is None]

    def read(self, span: Span) -> bytes:
        return bytes(self.bytes[span[0] : span[1]])

    def view(self, span: Span) -> memoryview:
        return memoryview(self.bytes)[span[0] : span[1]]

    def rot(self, at: int) -> None:
        """A bit changes by itself."""
        self.bytes[at] ^= 1
        self.rotten.append((at, at + 1))

    def is_rotten(self, span: Span) -> bool:
        return _common(self.rotten, [span]) is not None


class KeptHeaders(DeviceHeaders):
    """The headers of a device pool, in memory that needs no mapping here."""

    def __init__(self, handle: int, slots: int) -> None:
        self.descriptor, self._number = handle, 0
        self.table = HeaderTable(memoryview(bytearray(headers_bytes(slots))))

    @property
    def identity(self) -> MemoryIdentity:
        return MemoryIdentity(1, self.descriptor)


class DeviceMemory(Memory):
    """One shard's part of a device pool, which outlives workers and daemons.

    Attributes:
        handle: the descriptor by which it is passed on.
        headers: of the pool's slots, where this is the first shard's part.
        unwritten: slots that were committed before they were written; the fence of that has not signalled.
    """

    def __init__(self, name: str, handle: int, slots: int, block_bytes: int) -> None:
        super().__init__(name, slots * block_bytes)
        self.handle = handle
        self.headers = KeptHeaders(handle, slots)
        self.unwritten: set[int] = set()
        self._block_bytes = block_bytes

    def close(self) -> None:
        """It is given back.

        Raises:
            Broken: somebody may use it, or its headers name a block.
        """
        users = [claim.holder for claim in self._claims if claim.spans and not all(each.dead for each in claim.writers)]
        if users or len(self.headers.table.named_rows()):
            raise Broken(f"{self.name} is given back, and {users or 'its headers'} may use it yet")

    def block(self, slot: int) -> Span:
        return slot * self._block_bytes, (slot + 1) * self._block_bytes


def _common(one: Iterable[Span], other: Sequence[Span]) -> Span | None:
    """Bytes that are in both."""
    for start, end in one:
        for first, last in other:
            if start < last and first < end:
                return max(start, first), min(end, last)
    return None


def suspects_of(cache: Cache, tree: PrefixTree, pool: DevicePool) -> set[int]:
    """Slots of blocks that the core does not believe in before a fence has signalled."""
    found: set[int] = set()
    for session in cache.managed.sessions.values():
        for hold in session.holds if session.pool is pool else ():
            found.update(expand(tree.path_slots(hold.run, hold.suspect, hold.depth, pool.index).tobytes()))
    return found
