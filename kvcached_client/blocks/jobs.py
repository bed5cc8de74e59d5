"""What a shard is told to copy: plain values, the same for every shard, which pickle and MessagePack transport."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from kvcached_client.errors import bad_value
from kvcached_client.protocol.fields import decode
from kvcached_client.types import TransferId


class Indices(Protocol):
    """Integers: a numpy array of one dimension, or an `array.array`."""

    def __len__(self) -> int: ...

    def tolist(self) -> Any:  # noqa: ANN401 - the type that numpy declares
        """The numbers as a list."""


@dataclass(frozen=True, slots=True, eq=False)
class JobSpan:
    """Consecutive blocks of one chain.

    Attributes:
        depth: depth of the first block: the number of blocks before it in its chain.
        parent: key of the block before the first; empty at depth 0.
        keys: keys of the blocks, 16 bytes each.
        blocks: index of each block on the shard: in the engine's tensors, or in the device pool.
        slots: host slot of each block.
    """

    depth: int
    parent: bytes
    keys: bytes
    blocks: Indices
    slots: Indices

    def __repr__(self) -> str:
        # Without keys: whoever knows a key can ask for the block.
        return f"JobSpan(depth={self.depth}, blocks={len(self.blocks)})"


@dataclass(frozen=True, slots=True, eq=False)
class BlockJob:
    """One transfer, the same for every shard. `PreparedLoad.job` and `PreparedStore.job` make it.

    Attributes:
        transfer: id of the transfer, from `prepare_store` or `prepare_load`.
        generation: generation of the namespace, from the same reply: blocks of another generation are not used.
        spans: the blocks; at least one.
        start: depth of the first block that the daemon was asked for; it counts a load's bad blocks from there. A job
            may start later.
    """

    transfer: TransferId
    generation: int
    spans: tuple[JobSpan, ...]
    start: int = 0

    def __repr__(self) -> str:
        blocks = sum(len(span.blocks) for span in self.spans)
        what = f"transfer={self.transfer}, generation={self.generation}, start={self.start}"
        return f"BlockJob({what}, spans={len(self.spans)}, blocks={blocks})"

    @property
    def blocks(self) -> list[int]:
        """Index of each block on the shard, in the order of the job: what must be left alone until it is copied."""
        return [block for span in self.spans for block in span.blocks.tolist()]

    def to_bytes(self) -> bytes:
        """The job as bytes, for a pipe to a shard process."""
        return _encoder.encode(PackedJob.of(self))

    @staticmethod
    def from_bytes(data: bytes) -> BlockJob:
        """The inverse of `to_bytes`.

        Raises:
            BadRequest: the bytes are no job.
        """
        fix = "send BlockJob.to_bytes()"
        try:
            return decode(_decoder, data, "block job", fix).job()
        except ValueError as error:  # numbers that are cut
            raise bad_value(f"block job: {error}", fix) from None


class PackedSpan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A `JobSpan`; blocks and slots as int64 of this machine."""

    depth: int
    parent: bytes
    keys: bytes
    blocks: bytes
    slots: bytes

    @classmethod
    def of(cls, span: JobSpan) -> PackedSpan:
        """Pack a span."""
        blocks, slots = (array("q", each.tolist()).tobytes() for each in (span.blocks, span.slots))
        return cls(span.depth, span.parent, span.keys, blocks, slots)

    def span(self) -> JobSpan:
        """The span."""
        return JobSpan(self.depth, self.parent, self.keys, array("q", self.blocks), array("q", self.slots))


class PackedJob(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A `BlockJob`."""

    transfer: int
    generation: int
    start: int
    spans: tuple[PackedSpan, ...]

    @classmethod
    def of(cls, job: BlockJob) -> PackedJob:
        """Pack a job."""
        return cls(job.transfer, job.generation, job.start, tuple(map(PackedSpan.of, job.spans)))

    def job(self) -> BlockJob:
        """The job."""
        spans = tuple(span.span() for span in self.spans)
        return BlockJob(TransferId(self.transfer), self.generation, spans, self.start)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PackedJob)
