"""The record of generations: one object, which is replaced only by who knows its ETag.

The ETag of most services is a digest of the content, so the object begins with random bytes: each write has another
one. By these bytes a writer also finds its own record where the answer to its write was lost, and the library's second
attempt was refused.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final, NamedTuple

import obstore
from obstore.exceptions import AlreadyExistsError, PreconditionError

from kvcached.storage.backend import VersionedRecord
from kvcached.storage.s3.failures import Failure, S3Failure, failure

if TYPE_CHECKING:
    from obstore import PutMode
    from obstore.store import S3Store

_NONCE_BYTES: Final = 16
#: There is something else than the condition says; the last one: nothing.
_REFUSED: Final = (AlreadyExistsError, PreconditionError, FileNotFoundError)


class _Written(NamedTuple):
    """What is in the object, and its ETag."""

    nonce: bytes
    record: VersionedRecord


async def read(store: S3Store, path: str) -> VersionedRecord | None:
    """The record; None if there is none.

    Raises:
        Exception: the library's, or `S3Failure`.
    """
    written = await _written(store, path)
    return written.record if written else None


async def write(store: S3Store, path: str, data: bytes, after: bytes) -> bytes | None:
    """Replace the record of a version, b"" = none; returns the new version, or None if there is another.

    Raises:
        Exception: the library's, or `S3Failure`. It cannot be told whether the record was written.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    try:
        tag = await _put_if(store, path, nonce + data, after.decode())
    except _REFUSED:
        there = await _written(store, path)
        return there.record.version if there and there.nonce == nonce else None
    return tag.encode()


async def _put_if(store: S3Store, path: str, data: bytes, tag: str) -> str:
    """Write an object if there is none, or only the one with this ETag; returns the new ETag.

    Raises:
        Exception: the library's, or `S3Failure`.
    """
    mode: PutMode = {"e_tag": tag} if tag else "create"
    result = await obstore.put_async(store, path, data, mode=mode, use_multipart=False)
    return _tag(result["e_tag"])


async def _written(store: S3Store, path: str) -> _Written | None:
    try:
        answer = await obstore.get_async(store, path)
        content = bytes(await answer.buffer_async())
    except FileNotFoundError as error:
        if (why := failure(error)).code == "NoSuchBucket":  # which says nothing of the record
            raise S3Failure(why) from error
        return None
    tag = _tag(answer.meta["e_tag"])
    return _Written(content[:_NONCE_BYTES], VersionedRecord(content[_NONCE_BYTES:], tag.encode()))


def _tag(tag: str | None) -> str:
    if not tag:
        raise S3Failure(Failure(0, "", "the service tells no ETag of an object"))
    return tag
