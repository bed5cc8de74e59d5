"""Block keys: the only implementation of how the key of a block of tokens is computed. `docs/keys.md` describes it.

A key identifies the tokens of a block and all tokens before them. Rules:

* namespace root = BLAKE3 derive-key over everything that makes KV bytes interchangeable; chain root = BLAKE3 derive-key
  over the namespace root, the LoRA adapter and the tenant's salt. Every chain starts at a chain root, never at a
  namespace root.
* state of a block = BLAKE3 keyed by the 32-byte state before it, over the block's tokens as little-endian int32 and
  then the multimodal items in the block. Its first 16 bytes are the block's key.
* Everything but tokens is encoded as typed, length-prefixed fields: two different inputs never give the same bytes.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from copy import copy
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias, get_args

import numpy as np
from blake3 import blake3
from xxhash import xxh3_128_digest

from kvcached_client.errors import RequestError, bad_value
from kvcached_client.types import KEY_SIZE_BYTES, AcquiredPrefix, ChainKind, PackedKeys

try:
    from kvcached_client import _native_keys
except ImportError:  # installed without a C compiler: the same keys, computed more slowly
    native_blake3_blocks: Callable[[bytes, memoryview, int], tuple[bytes, bytes]] | None = None
    native_xxh3_blocks: Callable[[bytes, memoryview, int], tuple[bytes, bytes]] | None = None
else:
    native_blake3_blocks = _native_keys.blake3_blocks
    native_xxh3_blocks = _native_keys.xxh3_blocks

KeyAlgorithm = Literal["blake3", "xxh3"]
_ALGORITHMS: Final = get_args(KeyAlgorithm)
#: Integers, an integer array of one dimension, or raw bytes that hold little-endian int32.
Tokens: TypeAlias = (
    "Sequence[int] | np.ndarray[Any, np.dtype[np.integer[Any]]] | array[int] | bytes | bytearray | memoryview"
)

ROOT_SIZE_BYTES: Final = 32
TOKEN_SIZE_BYTES: Final = 4
TOKEN_MAX: Final = (1 << 31) - 1
#: The native helper hashes messages of at most one BLAKE3 chunk, and of XXH3 those that it mixes in one go.
NATIVE_BLOCK_SIZE_MAX: Final = 256
NATIVE_XXH3_BLOCK_SIZE_MAX: Final = 56
#: Chain roots that are kept: an engine has a few adapters and tenants at a time, and a root for each pair.
_ROOTS_KEPT: Final = 1024
#: Of so many keys that forks share, one may be behind them; with more, a fork has all keys shared anew.
_SHARED_PER_OWN: Final = 16
#: Up to this number of tokens, Python finds the largest token faster than numpy.
_SMALL_TOKEN_COUNT: Final = 64

NAMESPACE_CONTEXT: Final = "kvcached block keys v1: namespace root"
CHAIN_CONTEXT: Final = "kvcached block keys v1: chain root"


def encode_fields(*fields: int | str | bytes) -> bytes:
    """Fields as bytes, each ``tag · length (uint32) · payload``: ``i`` int64, ``s`` UTF-8, ``b`` bytes; little-endian.

    The encoding is injective: lists of fields that differ in number, type or value have different encodings.

    Raises:
        BadRequest: an integer outside int64, or text that UTF-8 cannot hold.
    """
    parts = []
    for field in fields:
        tag, payload = _payload(field)
        parts.append(struct.pack("<cI", tag, len(payload)) + payload)
    return b"".join(parts)


def _payload(field: int | str | bytes) -> tuple[bytes, bytes]:
    try:
        if isinstance(field, str):
            return b"s", field.encode()
        if isinstance(field, bytes):
            return b"b", field
        return b"i", struct.pack("<q", field)
    except (UnicodeEncodeError, struct.error) as error:
        raise bad_value(f"{field!r} cannot enter a key: {error}", "use UTF-8 text, bytes, 64-bit integers") from None


def namespace_root(
    *,
    model: str,
    revision: str,
    layout_fingerprint: str,
    block_size: int,
    shards: int,
    algorithm: KeyAlgorithm,
    generation: int,
) -> bytes:
    """The 32-byte root of every chain of a namespace; a different value of any argument gives an unrelated root.

    `layout_fingerprint` is `Layout.block_fingerprint()`; `generation` grows when the namespace is cleared.

    Raises:
        BadRequest: a size is not positive, the generation is negative, or the algorithm is unknown.
    """
    if block_size < 1 or shards < 1 or generation < 0:
        raise bad_value(
            f"block_size {block_size}, shards {shards}, generation {generation}",
            "sizes are positive, a generation is not negative",
        )
    _check_algorithm(algorithm)
    fields = encode_fields(model, revision, layout_fingerprint, block_size, shards, algorithm, generation)
    return blake3(fields, derive_key_context=NAMESPACE_CONTEXT).digest()


@lru_cache(maxsize=_ROOTS_KEPT)
def chain_root(namespace: bytes, *, lora: str = "", salt: str = "") -> bytes:
    """The 32-byte state before a request's first block; "" = no adapter, no salt.

    Raises:
        BadRequest: `namespace` is not 32 bytes long, or a name is no text, or not UTF-8.
    """
    if len(namespace) != ROOT_SIZE_BYTES:
        fix = f"it has {ROOT_SIZE_BYTES}: that of the client, or of `namespace_root`"
        raise bad_value(f"namespace root of {len(namespace)} bytes", fix)
    for name, value in (("lora", lora), ("salt", salt)):
        if not isinstance(value, str):  # a number would be another adapter than its text
            fix = "use text, and leave lora or salt out where there is none"
            raise bad_value(f"{name} cannot enter a key: it is a {type(value).__name__}", fix)
    return blake3(encode_fields(namespace, lora, salt), derive_key_context=CHAIN_CONTEXT).digest()


def pack_tokens(tokens: Tokens) -> memoryview:
    """The bytes of tokens as little-endian int32, checked; copied only if they have another format.

    Raises:
        BadRequest: not integers, more than one dimension, a token outside 0..2^31-1, or a number of bytes that is no
            multiple of four.
    """
    if isinstance(tokens, memoryview) and tokens.itemsize == 1:
        tokens = tokens.tobytes()
    if isinstance(tokens, (bytes, bytearray)):
        if len(tokens) % TOKEN_SIZE_BYTES:
            raise bad_value(f"{len(tokens)} bytes of packed tokens", "a multiple of 4: little-endian int32")
        return _check_array(np.frombuffer(tokens, "<i4"))
    if isinstance(tokens, (np.ndarray, array, memoryview)):
        return _check_array(np.asarray(tokens))
    try:
        packed = array("I", tokens)  # takes a third of the time of "i", and refuses negative tokens
    except (TypeError, ValueError, OverflowError) as error:
        raise bad_value(f"tokens: {error}", f"integers from 0 to {TOKEN_MAX}") from None
    if len(packed) > _SMALL_TOKEN_COUNT:
        return _check_array(np.frombuffer(packed, np.uint32))
    if packed and (highest := max(packed)) > TOKEN_MAX:
        raise _token_out_of_range(highest)
    return memoryview(packed.tobytes())


def _check_array(tokens: np.ndarray[Any, Any]) -> memoryview:
    if tokens.ndim != 1:
        raise bad_value(f"tokens have {tokens.ndim} dimensions", "pass one request's tokens, one dimension")
    if tokens.size:  # the type of an empty array means nothing: numpy's default is float
        if tokens.dtype.kind not in "iu":
            raise bad_value(f"tokens are {tokens.dtype}", f"integers from 0 to {TOKEN_MAX}")
        if tokens.dtype == np.int32:  # negative tokens are large ones, so that one look is enough
            highest = int(np.maximum.reduce(tokens.view(np.uint32)))  # which `max` calls after some detours
            if highest > TOKEN_MAX:
                raise _token_out_of_range(int(tokens.min()))
            return np.ascontiguousarray(tokens, "<i4").view(np.uint8).data
        for extreme in (tokens.min(), tokens.max()):
            if not 0 <= int(extreme) <= TOKEN_MAX:
                raise _token_out_of_range(int(extreme))
    return tokens.astype("<i4", order="C", copy=False).view(np.uint8).data


def _token_out_of_range(token: int) -> RequestError:
    return bad_value(f"token {token}", f"integers from 0 to {TOKEN_MAX}")


class _Hash(NamedTuple):
    """An algorithm's two functions of a parent state: hash one message; hash a chain of blocks of equal size."""

    hash_message: Callable[[bytes, bytes], bytes]
    hash_blocks: Callable[[bytes, memoryview, int], tuple[bytes, bytes]]


def _blake3_message(parent: bytes, message: bytes) -> bytes:
    return blake3(message, key=parent).digest()


def _blake3_blocks(parent: bytes, data: memoryview, block_bytes: int) -> tuple[bytes, bytes]:
    if native_blake3_blocks is not None and block_bytes <= NATIVE_BLOCK_SIZE_MAX * TOKEN_SIZE_BYTES:
        return native_blake3_blocks(parent, data, block_bytes // TOKEN_SIZE_BYTES)
    messages = struct.iter_unpack(f"{block_bytes}s", data)
    states = b"".join([parent := blake3(message, key=parent).digest() for (message,) in messages])
    return np.frombuffer(states, np.uint8).reshape(-1, len(parent))[:, :KEY_SIZE_BYTES].tobytes(), parent


def _xxh3_message(parent: bytes, message: bytes) -> bytes:
    return xxh3_128_digest(parent[:KEY_SIZE_BYTES] + message)


def _xxh3_blocks(parent: bytes, data: memoryview, block_bytes: int) -> tuple[bytes, bytes]:
    parent = parent[:KEY_SIZE_BYTES]
    if native_xxh3_blocks is not None and block_bytes <= NATIVE_XXH3_BLOCK_SIZE_MAX * TOKEN_SIZE_BYTES:
        return native_xxh3_blocks(parent, data, block_bytes // TOKEN_SIZE_BYTES)
    messages = struct.iter_unpack(f"{block_bytes}s", data)
    return b"".join([parent := xxh3_128_digest(parent + message) for (message,) in messages]), parent


def _check_algorithm(algorithm: str) -> None:
    if algorithm not in _ALGORITHMS:
        raise bad_value(f"key algorithm {algorithm!r}", f"one of {', '.join(_ALGORITHMS)}")


def _hash_of(algorithm: str) -> _Hash:
    _check_algorithm(algorithm)
    if algorithm == "blake3":
        return _Hash(_blake3_message, _blake3_blocks)
    return _Hash(_xxh3_message, _xxh3_blocks)


class _Item(NamedTuple):
    """A multimodal item and the tokens [start, end) that represent it."""

    item_id: bytes | str
    start: int
    end: int


class KeyChain:
    """The keys of one request's blocks, extended as its tokens become known. Each token is hashed once.

    Not thread-safe.
    """

    def __init__(
        self,
        namespace: bytes,
        block_size: int,
        tokens: Tokens = (),
        *,
        lora: str = "",
        salt: str = "",
        algorithm: str = "blake3",
        keeps_tokens: bool = False,
    ) -> None:
        """Start a chain at the root of (`namespace`, `lora`, `salt`) and extend it by `tokens`.

        `namespace` is the 32 bytes of `namespace_root`; `block_size` is in tokens. A request with multimodal items
        starts with an empty chain, adds the items with `add_item`, and then calls `extend`. With `keeps_tokens`,
        `token_range` gives the tokens of blocks.

        Raises:
            BadRequest: an argument is malformed, or `algorithm` is unknown.
        """
        if block_size < 1:
            raise bad_value(f"block_size {block_size}", "blocks have at least one token")
        self._block_size = block_size
        self._hash = _hash_of(algorithm)
        #: A session refuses a chain of another kind: nobody would find its blocks.
        self.kind = ChainKind(namespace, block_size, algorithm)
        #: State after the last complete block; the chain root before the first.
        self._state = chain_root(namespace, lora=lora, salt=salt)
        #: Keys that forks share, and those behind them.
        self._shared, self._keys = b"", bytearray()
        #: Packed tokens of complete blocks; None where they are not kept. Those of a tenant or an adapter never are:
        #: without the salt or the adapter they say of another prompt that it is cached.
        self._tokens = bytearray() if keeps_tokens and not (lora or salt) else None
        #: Packed tokens after the last complete block, less than a block of them.
        self._tail = b""
        #: In order of their start, without overlaps.
        self._items: list[_Item] = []
        #: Index of the first item that ends after the last complete block.
        self._open_item = 0
        #: The prompt that was acquired last, with this chain or with one that it was forked from.
        self.acquired: AcquiredPrefix | None = None
        self.extend(tokens)

    def __repr__(self) -> str:  # without keys and tokens: whoever knows a key can ask for the block
        return f"KeyChain(tokens={self.token_count}, blocks={self.block_count}, block_size={self._block_size})"

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    @property
    def block_count(self) -> int:
        """Complete blocks."""
        return (len(self._shared) + len(self._keys)) // KEY_SIZE_BYTES

    @property
    def token_count(self) -> int:
        """All tokens, including those of the incomplete last block."""
        return self.block_count * self._block_size + len(self._tail) // TOKEN_SIZE_BYTES

    @property
    def keys(self) -> PackedKeys:
        """Keys of all complete blocks, 16 bytes each, in order."""
        return PackedKeys(self._shared + self._keys)

    def key_range(self, start: int, stop: int) -> PackedKeys:
        """Keys of the complete blocks [start, stop).

        Raises:
            BadRequest: the range leaves the complete blocks.
        """
        if not 0 <= start <= stop <= self.block_count:
            raise bad_value(f"blocks [{start}, {stop})", f"the chain has {self.block_count} complete blocks")
        first, end = start * KEY_SIZE_BYTES, stop * KEY_SIZE_BYTES
        shared = len(self._shared)
        if first < shared:
            return PackedKeys(self._shared[first:end] + self._keys[: max(end - shared, 0)])
        return PackedKeys(bytes(self._keys[first - shared : end - shared]))

    def token_range(self, start: int, stop: int) -> bytes | None:
        """The tokens of the complete blocks [start, stop), as little-endian int32; None where they are not kept.

        From the first multimodal item on they are -1: tokens alone do not say what the prompt is.

        Raises:
            BadRequest: the range leaves the complete blocks.
        """
        if not 0 <= start <= stop <= self.block_count:
            raise bad_value(f"blocks [{start}, {stop})", f"the chain has {self.block_count} complete blocks")
        if self._tokens is None:
            return None
        block_bytes = self._block_size * TOKEN_SIZE_BYTES
        plain = self._items[0].start // self._block_size if self._items else stop
        end = min(max(plain, start), stop)
        return bytes(self._tokens[start * block_bytes : end * block_bytes]) + b"\xff" * ((stop - end) * block_bytes)

    def extend(self, tokens: Tokens) -> None:
        """Append tokens. The keys do not depend on how tokens are split into calls.

        Raises:
            BadRequest: see `pack_tokens`; the chain is unchanged.
        """
        data = pack_tokens(tokens)
        if self._tail:
            data = memoryview(b"".join((self._tail, data)))
        end = len(data) - len(data) % (self._block_size * TOKEN_SIZE_BYTES)
        if not end:
            self._tail = data.tobytes()
            return
        blocks, tail, open_item = data[:end], data[end:].tobytes(), self._open_item
        if open_item == len(self._items):
            keys, state = self._hash.hash_blocks(self._state, blocks, self._block_size * TOKEN_SIZE_BYTES)
        else:
            keys, state, open_item = self._hash_with_items(blocks)
        # An exception of a signal handler comes behind a call. There is none from here on, so that it finds the chain
        # with all of the tokens or with none.
        if self._tokens is not None:
            self._tokens += blocks
        self._keys += keys
        self._state, self._open_item, self._tail = state, open_item, tail

    def fork(self) -> Self:
        """A chain that goes on from here by itself, as another turn of a conversation does; nothing is hashed again.

        Both share the keys that they have, so that a fork costs next to nothing, however long the chain is.
        """
        if len(self._keys) * _SHARED_PER_OWN >= len(self._shared):
            self._shared, self._keys = self.keys, bytearray()
        other = copy(self)
        other._keys, other._items = self._keys.copy(), self._items.copy()  # noqa: SLF001 - of this class
        other._tokens = None if self._tokens is None else self._tokens.copy()  # noqa: SLF001 - as above
        return other

    def add_item(self, item_id: bytes | str, start: int, length: int) -> None:
        """Add a multimodal item, represented by the tokens [start, start + length), before their block is complete.

        `item_id` identifies the item's content as the model sees it, such as a hash of the processed input. Items are
        added in order.

        Raises:
            BadRequest: the id or the span is empty, the span reaches into a complete block, or starts before the
                end of the previous item.
        """
        if not item_id:
            raise bad_value(f"item id {item_id!r}", "name the item's content by text or bytes that are not empty")
        hashed = self.block_count * self._block_size
        earliest = max(hashed, self._items[-1].end if self._items else 0)
        if start < earliest or length < 1:
            raise bad_value(
                f"item {item_id!r} of {length} tokens at {start}",
                f"at least one token, from {earliest} on: items come in order, before their tokens' keys",
            )
        encode_fields(item_id, start, start + length)  # an item that cannot be encoded is refused now, not in `extend`
        self._items.append(_Item(item_id, start, start + length))

    def splits_item(self, tokens: int) -> bool:
        """Whether a boundary after `tokens` tokens lies strictly inside an item."""
        return any(item.start < tokens < item.end for item in self._items)

    def whole_item_blocks(self, blocks: int) -> int:
        """The most leading blocks, at most `blocks`, whose end splits no item.

        If the model can only encode whole items, a hit shrinks to this.
        """
        for item in reversed(self._items):
            if item.start < blocks * self._block_size < item.end:
                blocks = item.start // self._block_size
        return blocks

    def _hash_with_items(self, data: memoryview) -> tuple[bytes, bytes, int]:
        """The keys of the next blocks, the state after them, and the first item that ends after them."""
        state, item, block_bytes = self._state, self._open_item, self._block_size * TOKEN_SIZE_BYTES
        keys, done, hashed = [], 0, self.block_count
        while done < len(data):
            blocks, item = self._blocks_before_items(hashed, (len(data) - done) // block_bytes, item)
            if blocks:
                found, state = self._hash.hash_blocks(state, data[done : done + blocks * block_bytes], block_bytes)
            else:
                blocks, message = 1, (data[done : done + block_bytes], self._item_fields(hashed, item))
                state = self._hash.hash_message(state, b"".join(message))
                found = state[:KEY_SIZE_BYTES]
            keys.append(found)
            done, hashed = done + blocks * block_bytes, hashed + blocks
        return b"".join(keys), state, item

    def _blocks_before_items(self, hashed: int, blocks: int, item: int) -> tuple[int, int]:
        """How many of the `blocks` blocks from depth `hashed` on come before the first block with a token of an item.

        Also which item that is, from `item` on: the first that ends after depth `hashed`.
        """
        tokens = hashed * self._block_size
        while item < len(self._items) and self._items[item].end <= tokens:
            item += 1
        if item == len(self._items):
            return blocks, item
        return min(blocks, max(0, self._items[item].start - tokens) // self._block_size), item

    def _item_fields(self, hashed: int, item: int) -> bytes:
        """The encoded items of the block at depth `hashed`, from `item` on.

        Each is its id, its start relative to the block (negative: before the block), and its length.
        """
        first = hashed * self._block_size
        fields: list[int | str | bytes] = []
        for each in self._items[item:]:
            if each.start >= first + self._block_size:
                break
            fields += (each.item_id, each.start - first, each.end - each.start)
        return encode_fields(*fields)
