"""The messages that routers read: vLLM's batches of events, with the namespace in each event. `docs/events.md`.

A batch is an array ``[ts, events, data_parallel_rank]``, an event a map with the key ``type``, as in vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Literal, NamedTuple, cast

import msgspec
import numpy as np

from kvcached.core.messages import AllRemoved, BlocksRemoved, BlocksStored, Tier
from kvcached.events.token_book import TokensStored
from kvcached_client.types import KEY_SIZE_BYTES

#: vLLM's names of media. A device pool is told as GPU on every device, for routers know no other name of it.
MEDIUM_DEVICE: Final = "GPU"
MEDIUM_HOST: Final = "CPU"

#: A key as MessagePack's bin 8. Keys that are one item each are copied seven times as fast as their bytes.
_BYTES_ROW: Final = np.dtype([("head", ">u2"), ("key", f"V{KEY_SIZE_BYTES}")])
_BYTES_HEAD: Final = 0xC400 + KEY_SIZE_BYTES
#: The end of a key as MessagePack's uint 64.
_INT_BYTES: Final = 8
_INT_ROW: Final = np.dtype([("head", "u1"), ("key", f"V{_INT_BYTES}")])
_INT_HEAD: Final = 0xCF
_NIL: Final = b"\xc0"
#: A token as MessagePack's uint 32, which decoders read as any other integer.
_TOKEN_ROW: Final = np.dtype([("head", "u1"), ("token", ">u4")])
_TOKEN_HEAD: Final = 0xCE
_NO_TOKENS: Final = b"\x90"  #: its empty array
_ARRAY_HEAD: Final = b"\xdd"  #: its array 32
#: Stands for keys while the rest of an event is packed: no text has this byte, and no number so many of it.
_GAP: Final = b"\xc1" * 16

#: How keys are told: whole, or their last 8 bytes as an unsigned integer, as vLLM does unless it is told otherwise.
HashForm = Literal["bytes", "int"]

#: What an event is made of.
Told = BlocksStored | TokensStored | BlocksRemoved | AllRemoved


class BlockStored(msgspec.Struct, frozen=True, omit_defaults=True, tag=True, gc=False):
    """vLLM's event of the same name; `namespace` and `generation` are this daemon's own.

    Attributes:
        block_hashes: keys, an array of bytes or integers.
        parent_block_hash: key of the block before them.
        token_ids: tokens of all of the blocks; none where routers may not know them, or the daemon does not.
        block_size: tokens per block.
        lora_id, lora_name: not known: they are part of the keys.
        medium: the tier.
        namespace: root of the keys, as hex digits.
        generation: of the namespace.
    """

    block_hashes: msgspec.Raw
    parent_block_hash: bytes | int | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    namespace: str = ""
    generation: int = 0


class BlockRemoved(msgspec.Struct, frozen=True, omit_defaults=True, tag=True, gc=False):
    """vLLM's event of the same name."""

    block_hashes: msgspec.Raw
    medium: str | None
    namespace: str = ""
    generation: int = 0


class AllBlocksCleared(msgspec.Struct, frozen=True, omit_defaults=True, tag=True, gc=False):
    """vLLM's event of the same name: every block of the batch's topic and rank is gone."""

    namespace: str = ""
    generation: int = 0


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Events of one tier of one namespace.

    Attributes:
        ts: when they were published, in seconds since 1970.
        events: in order.
        data_parallel_rank: the replica's place in its namespace; None for host memory, which all replicas share.
    """

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


_encode: Final = msgspec.msgpack.Encoder().encode
decode_batch: Final = msgspec.msgpack.Decoder(EventBatch).decode
_decode_hashes: Final = msgspec.msgpack.Decoder(list[bytes | int]).decode


class _Forms(NamedTuple):
    """Events of one tier in MessagePack, cut where one event of the kind differs from the next."""

    stored: tuple[bytes, bytes, bytes, bytes]  #: before the keys, between them and the parent, the tokens, behind these
    removed: tuple[bytes, bytes]
    cleared: bytes


@lru_cache(maxsize=64)
def _forms_of(tier: Tier) -> _Forms:
    """Most of an event is the same for all of a tier: msgspec packs it once."""
    gap, namespace, generation, medium = msgspec.Raw(_GAP), tier.namespace.hex(), tier.generation, medium_of(tier)
    parent, tokens = cast("bytes", gap), cast("tuple[int, ...]", gap)
    stored = BlockStored(gap, parent, tokens, tier.block_size, None, medium, None, namespace, generation)
    before, between, middle, behind = _encode(stored).split(_GAP)
    head, tail = _encode(BlockRemoved(gap, medium, namespace, generation)).split(_GAP)
    return _Forms((before, between, middle, behind), (head, tail), _encode(AllBlocksCleared(namespace, generation)))


def encode_batch(ts: float, changes: Sequence[Told], rank: int | None, form: HashForm = "bytes") -> bytes:
    """Changes of the index, which belong to one rank, as routers read them: an `EventBatch`."""
    keys = b"".join([change.keys for change in changes if not isinstance(change, AllRemoved)])
    pack, row_bytes = (_as_ints, _INT_ROW.itemsize) if form == "int" else (_as_bytes, _BYTES_ROW.itemsize)
    rows = memoryview(pack(keys))
    pieces: list[bytes | memoryview] = [_ARRAY_HEAD, len(changes).to_bytes(4, "big")]
    at, tier, forms = 0, None, None
    for change in changes:
        if forms is None or change.tier is not tier:
            tier = change.tier
            forms = _forms_of(tier)
        if isinstance(change, AllRemoved):
            pieces.append(forms.cleared)
            continue
        count = len(change.keys) // KEY_SIZE_BYTES
        end = at + count * row_bytes
        hashes = (_ARRAY_HEAD, count.to_bytes(4, "big"), rows[at:end])
        at = end
        if isinstance(change, BlocksRemoved):
            head, tail = forms.removed
            pieces += (head, *hashes, tail)
        else:
            before, between, middle, behind = forms.stored
            parent = pack(change.parent) if change.parent else _NIL
            tokens = _packed_tokens(change.tokens) if isinstance(change, TokensStored) else _NO_TOKENS
            pieces += (before, *hashes, between, parent, middle, tokens, behind)
    return _encode((ts, msgspec.Raw(b"".join(pieces)), rank))


def medium_of(tier: Tier) -> str:
    """VLLM's name of a tier."""
    return MEDIUM_HOST if tier.rank is None else MEDIUM_DEVICE


def _as_bytes(keys: bytes) -> bytes:
    """Keys as MessagePack's bytes, back to back: a list of them for msgspec would cost ten times as much."""
    rows = np.empty(len(keys) // KEY_SIZE_BYTES, _BYTES_ROW)
    rows["head"] = _BYTES_HEAD
    rows["key"] = np.frombuffer(keys, _BYTES_ROW["key"])
    return rows.tobytes()


def _as_ints(keys: bytes) -> bytes:
    """The ends of keys as MessagePack's integers, back to back."""
    rows = np.empty(len(keys) // KEY_SIZE_BYTES, _INT_ROW)
    rows["head"] = _INT_HEAD
    rows["key"] = np.frombuffer(keys, _INT_ROW["key"])[KEY_SIZE_BYTES // _INT_BYTES - 1 :: KEY_SIZE_BYTES // _INT_BYTES]
    return rows.tobytes()


def weight_of(change: Told) -> int:
    """What one of its blocks takes in a message, in keys."""
    return told_weight(change.tier.block_size) if isinstance(change, TokensStored) else 1


def told_weight(block_size: int) -> int:
    """What a block with its tokens takes in a message, in keys."""
    return 1 - -block_size * _TOKEN_ROW.itemsize // _BYTES_ROW.itemsize


def _packed_tokens(tokens: bytes) -> bytes:
    """Tokens as MessagePack's array, all of them at once."""
    rows = np.empty(len(tokens) // 4, _TOKEN_ROW)
    rows["head"] = _TOKEN_HEAD
    rows["token"] = np.frombuffer(tokens, "<i4")
    return _ARRAY_HEAD + len(rows).to_bytes(4, "big") + rows.tobytes()


def hashes_of(event: BlockStored | BlockRemoved) -> list[bytes | int]:
    """The keys of an event, one by one."""
    return _decode_hashes(event.block_hashes)
