"""A backend that encrypts values and their names before it passes them to another backend.

Somebody who can read the storage learns how many values there are, their sizes, which of them belong to one namespace,
and when they are used. Somebody who can write to it can delete values, and restore an earlier value under its name,
which has the same bytes; nothing else. A value that fails authentication is deleted and counts as absent.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from kvcached.storage.backend import (
    ABSENT,
    Block,
    Outcome,
    RecordUnusable,
    Result,
    Storage,
    StorageMisconfigured,
    StorageUnusable,
    Usage,
    VersionedRecord,
    memory_for,
    no_progress,
)
from kvcached.storage.frame import FRAME_BYTES, SHARDS_MAX
from kvcached_client.protocol.key_files import is_private

SECRET_BYTES: Final = 32
#: The most bytes of one call, unless a single block is larger.
_COPIES_BYTES_MAX: Final = 64 << 20


def read_secret(path: Path) -> bytes:
    """The key in a file: 32 bytes, or 64 hexadecimal digits.

    Raises:
        StorageUnusable: there is no file, others may read it, or it holds no key. What to do stands behind "; ".
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        fix = _fix_of(error, path)
        raise StorageUnusable(f"encryption: the key file {path}: {error.strerror}; {fix}") from error
    try:
        _check_private(descriptor, path)
        content = os.read(descriptor, 1024)
    finally:
        os.close(descriptor)
    return _decoded(content, path)


def _fix_of(error: OSError, path: Path) -> str:
    """What to do where a key file cannot be opened. A command that writes is only for a path where nothing is."""
    name = shlex.quote(str(path))
    if isinstance(error, FileNotFoundError):
        # `set -C`: the path may be another one by the time that somebody enters this, and a key is never replaced.
        return f"make one: (umask 077; set -C; openssl rand -hex {SECRET_BYTES} >{name})"
    if isinstance(error, PermissionError):
        own = os.geteuid()
        return f"run this as the daemon's user, or give the file to this one: chown {own} {name}"
    return "name the file of a key"


def _check_private(descriptor: int, path: Path) -> None:
    state = os.fstat(descriptor)
    own, name = os.geteuid(), shlex.quote(str(path))
    if not stat.S_ISREG(state.st_mode):
        raise StorageUnusable(f"encryption: {path} is no regular file; name the file of a key")
    if state.st_uid not in (0, own):
        what = f"{path} belongs to user {state.st_uid}, and this is user {own}"
        raise StorageUnusable(f"encryption: {what}; run this as the daemon's user, or chown {own} {name}")
    if not is_private(descriptor):
        raise StorageUnusable(f"encryption: others than the owner of {path} may use it; chmod 600 {name}")


def _decoded(content: bytes, path: Path) -> bytes:
    if len(content) == SECRET_BYTES:
        return content
    try:
        secret = bytes.fromhex(content.decode("ascii").strip())
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise StorageUnusable(
            f"encryption: {path} holds no key of {SECRET_BYTES} bytes or {2 * SECRET_BYTES} hexadecimal digits;"
            f" name the file of a key; `openssl rand -hex {SECRET_BYTES}` prints a new one"
        )
    return secret


class EncryptedStorage(Storage):
    """Encrypts for an inner backend, which gets encrypted values under encrypted names. Values begin with a frame."""

    def __init__(self, inner: Storage, secret: bytes) -> None:
        """Take a backend and a key of 32 bytes.

        Raises:
            StorageMisconfigured: the package that encrypts is not installed.
        """
        try:
            from kvcached.storage.encryption.cipher import BlockCipher  # noqa: PLC0415 - needs an optional package
        except ImportError as error:
            raise StorageMisconfigured("encryption needs the package cryptography: pip install cryptography") from error
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a key of {len(secret)} bytes; it has {SECRET_BYTES}")
        self.capabilities = inner.capabilities
        self._inner = inner
        self._cipher = BlockCipher(secret)

    def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        """As inside."""
        return self._inner.exists([self._cipher.name(key) for key in keys], timeout_s=timeout_s)

    def missing(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        """As inside."""
        return self._inner.missing([self._cipher.name(key) for key in keys], timeout_s=timeout_s)

    def get(self, blocks: Sequence[Block], *, timeout_s: float) -> list[Result]:
        """Read and decrypt; a value that fails authentication is deleted."""
        return _in_portions(blocks, timeout_s, self._get)

    def _get(self, blocks: Sequence[Block], timeout_s: float) -> list[Result]:
        until_s = time.monotonic() + timeout_s
        inside = list(self._copies(blocks))
        results = self._inner.get(inside, timeout_s=timeout_s)
        results = [
            self._decrypted(*each) if each[0].outcome is Outcome.DONE else each[0]
            for each in zip(results, inside, blocks, strict=True)
        ]
        bad = [each.key for each, result in zip(inside, results, strict=True) if result is _FORGED]
        left_s = until_s - time.monotonic()
        if bad and left_s > 0:  # else the next one who reads them does it
            with contextlib.suppress(Exception):  # they count as absent, whether they can be deleted or not
                self._inner.discard(bad, timeout_s=left_s)
        return [ABSENT if result is _FORGED else result for result in results]

    def _decrypted(self, result: Result, inside: Block, block: Block) -> Result:
        return result if self._cipher.decrypt(inside.key, inside.parts, block.parts) else _FORGED

    def put(self, blocks: Sequence[Block], *, timeout_s: float) -> list[Result]:
        """Encrypt and write."""
        return _in_portions(blocks, timeout_s, self._put)

    def _put(self, blocks: Sequence[Block], timeout_s: float) -> list[Result]:
        inside = list(self._copies(blocks))
        for copy, block in zip(inside, blocks, strict=True):
            self._cipher.encrypt(copy.key, block.parts, copy.parts)
        return self._inner.put(inside, timeout_s=timeout_s)

    def delete(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        """As inside."""
        return self._inner.delete([self._cipher.name(key) for key in keys], timeout_s=timeout_s)

    def unsettled(self, keys: Sequence[bytes]) -> str:
        """As inside."""
        return self._inner.unsettled([self._cipher.name(key) for key in keys])

    def discard(self, keys: Sequence[bytes], *, timeout_s: float) -> None:
        """As inside."""
        self._inner.discard([self._cipher.name(key) for key in keys], timeout_s=timeout_s)

    def clear(self, prefix: bytes, *, timeout_s: float, progress: Callable[[], None] = no_progress) -> int:
        """As the inner backend; without a prefix this also deletes values that were encrypted with other keys."""
        inside = self._cipher.prefix(prefix) if prefix else b""
        return self._inner.clear(inside, timeout_s=timeout_s, progress=progress)

    def usage(self) -> Usage:
        """As inside."""
        return self._inner.usage()

    def trouble(self) -> str:
        """As inside."""
        return self._inner.trouble()

    def read_record(self, *, timeout_s: float) -> VersionedRecord | None:
        """Read and decrypt the record.

        Raises:
            RecordUnusable: it is not encrypted with this key.
            Exception: the inner backend cannot read it.
        """
        record = self._inner.read_record(timeout_s=timeout_s)
        if record is None:
            return None
        data = self._cipher.decrypt_record(record.data)
        if data is None:
            why = "it is not encrypted with this key; give all daemons that share it the same key_file"
            raise RecordUnusable(why, record.version)
        return record._replace(data=data)

    def write_record(self, data: bytes, after: bytes, *, timeout_s: float) -> bytes | None:
        """Encrypt the record and replace it as the inner backend does."""
        return self._inner.write_record(self._cipher.encrypt_record(data), after, timeout_s=timeout_s)

    def close(self) -> None:
        """Close the inner backend, too."""
        self._inner.close()

    def _copies(self, blocks: Sequence[Block]) -> Iterator[Block]:
        """Memory for the encrypted form of each block: every part begins on a page, as in the block's own memory."""
        for block in blocks:
            sizes = [part.nbytes for part in block.parts]
            if not sizes or sizes[0] != FRAME_BYTES or len(sizes) > 1 + SHARDS_MAX:
                raise ValueError(f"a value of parts of {sizes} bytes does not begin with a frame")
            yield Block(self._cipher.name(block.key), memory_for(sizes))


def _in_portions(
    blocks: Sequence[Block], timeout_s: float, carry_out: Callable[[Sequence[Block], float], list[Result]]
) -> list[Result]:
    """The results of a batch, whose portions have one time limit together."""
    until_s = time.monotonic() + timeout_s
    results: list[Result] = []
    for some in _portions(blocks):
        left_s = until_s - time.monotonic() if results else timeout_s
        late = Result(Outcome.FAILED, f"not begun within {timeout_s:g} s")
        results += carry_out(some, left_s) if left_s > 0 else [late] * len(some)
    return results


def _portions(blocks: Sequence[Block]) -> Iterator[Sequence[Block]]:
    """A batch in portions that are copied at a time, so that large blocks do not take gigabytes in each thread."""
    first = size_bytes = 0
    for number, block in enumerate(blocks):
        if size_bytes and size_bytes + block.size_bytes > _COPIES_BYTES_MAX:
            yield blocks[first:number]
            first = number
            size_bytes = 0
        size_bytes += block.size_bytes
    yield blocks[first:]


_FORGED: Final = Result(Outcome.ABSENT, "it is not what was encrypted")
