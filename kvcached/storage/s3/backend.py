"""Blocks in a bucket: one object each.

A call's requests run at the same time, on an event loop of the backend's own. The body of a write is a copy: a request
that is ended may be read from for a moment longer, when the host pool's slot already holds another block. What is read
is copied to the host pool on the loop, between two steps of the request, so never after its call has returned.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import obstore
from obstore.exceptions import BaseError, InvalidPathError
from obstore.store import S3Store

from kvcached.storage.backend import (
    ABSENT,
    DONE,
    PREFIX_BYTES,
    STORED_KEY_BYTES,
    WRONG,
    Block,
    Capabilities,
    Result,
    Storage,
    StorageUnusable,
    Usage,
    VersionedRecord,
    no_progress,
)
from kvcached.storage.s3 import record
from kvcached.storage.s3.calls import Calls, sure
from kvcached.storage.s3.credentials import FileCredentials
from kvcached.storage.s3.failures import is_unanswered, result_of
from kvcached.storage.s3.late_writes import LATE_S, LateWrites
from kvcached.storage.s3.probe import Probe
from kvcached.storage.s3.settings import S3Settings

if TYPE_CHECKING:
    from obstore import ListStream, ObjectMeta
    from obstore.store import ClientConfig, RetryConfig, S3Config

BATCH_BLOCKS: Final = 32
#: Of the bodies of one call, unless a single block is larger: each thread has that much memory beside the host pool.
IN_FLIGHT_BYTES_MAX: Final = 32 << 20
#: What one request names when it deletes, and what one page of a list has at most.
_PAGE: Final = 1000
#: The least limit for one page of a clear: services delete the objects of a page one after the other.
_PAGE_TIMEOUT_S: Final = 60.0
#: How long it is told that there is nothing: others write, too. As long as the answer to a question takes to be read.
_EMPTY_S: Final = 5.0
#: The library's own limit of one request. Each call has a shorter one, which ends its requests.
_REQUEST_TIMEOUT: Final = timedelta(minutes=10)
_RETRY: RetryConfig = {
    "max_retries": 2,
    "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 2},
}
_NAME: Final = re.compile(rf"[0-9a-f]{{{2 * PREFIX_BYTES}}}/[0-9a-f]{{{2 * (STORED_KEY_BYTES - PREFIX_BYTES)}}}")


class S3Storage(Storage):
    """One prefix in a bucket.

    Attributes:
        calls: where requests run.

    Raises:
        S3Failure: from every method but `get` and `put`: the service refuses, or does not answer.
    """

    def __init__(self, settings: S3Settings) -> None:
        """Prepare for requests; makes none.

        Raises:
            StorageUnusable: there is no credentials file, or no file of authorities, or the library refuses them.
        """
        self.capabilities = Capabilities(threads=settings.threads, batch_blocks=BATCH_BLOCKS, is_shared=True)
        self._store = _store(settings)
        self._prefix = settings.prefix
        self._blocks = f"{settings.prefix}blocks/"
        self._record = f"{settings.prefix}record"
        self._empty_until_s = 0.0
        self._late = LateWrites()
        self.calls = Calls()

    def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        """Ask for each."""
        found = self.calls.run_all([self._exists(key) for key in keys], timeout_s)
        return self._noted([sure(each) for each in found])

    def get(self, blocks: Sequence[Block], *, timeout_s: float) -> list[Result]:
        """Read blocks."""
        gate = _gate(blocks)
        results = _results(self.calls.run_all([self._get(block, gate) for block in blocks], timeout_s))
        self._noted([each in {DONE, WRONG} for each in results])
        return results

    def put(self, blocks: Sequence[Block], *, timeout_s: float) -> list[Result]:
        """Write blocks; what is there is replaced."""
        self._empty_until_s = 0.0
        gate = _gate(blocks)
        outcomes = self.calls.run_all([self._put(block, gate) for block in blocks], timeout_s)
        pairs = zip(blocks, outcomes, strict=True)
        self._late.add(block.key for block, outcome in pairs if is_unanswered(outcome))
        return _results(outcomes)

    def delete(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        """Ask for each, and delete what there is: a service does not say what was there.

        What may be written after it was asked for is deleted in any case.
        """
        found, late = self.exists(keys, timeout_s=timeout_s), self._late.among(keys)
        there = {key for key, is_there in zip(keys, found, strict=True) if is_there}
        self.calls.run(self._delete([self._path(key) for key in sorted(there | late)]), timeout_s)
        return len(there)

    def unsettled(self, keys: Sequence[bytes]) -> str:
        """Keys whose write got no answer lately."""
        late = len(self._late.among(keys))
        what = f"writes of {late} blocks got no answer, and the service may still carry them out"
        return f"{what}; repeat it in {LATE_S / 60:g} minutes" if late else ""

    def clear(self, prefix: bytes, *, timeout_s: float, progress: Callable[[], None] = no_progress) -> int:
        """List and delete in pages, each of them with a time limit of its own."""
        page_timeout_s = max(timeout_s, _PAGE_TIMEOUT_S)
        where = f"{self._blocks}{prefix.hex()}/" if prefix else self._blocks
        pages = obstore.list(self._store, where, chunk_size=_PAGE)
        count = 0
        while (names := self.calls.run(self._next_of(pages), page_timeout_s)) is not None:
            count += self.calls.run(self._delete(names), page_timeout_s)
            progress()
        return count

    def usage(self) -> Usage:
        """Only whether it was empty a moment ago: a service does not tell how full it is."""
        is_empty = time.monotonic() < self._empty_until_s
        return Usage(blocks=0 if is_empty else -1, size_bytes=-1, capacity_bytes=-1)

    def read_record(self, *, timeout_s: float) -> VersionedRecord | None:
        """Read its object. Where there is none, `usage` says afterwards whether there are no blocks either."""
        return self.calls.run(self._read_record(), timeout_s)

    def write_record(self, data: bytes, after: bytes, *, timeout_s: float) -> bytes | None:
        """Write its object, on the condition that it has the ETag that is the version."""
        return self.calls.run(record.write(self._store, self._record, data, after), timeout_s)

    def close(self) -> None:
        """End the thread of the requests."""
        self.calls.close()

    async def look(self) -> None:
        """Look whether there are no blocks, for `usage`."""
        pages = obstore.list(self._store, self._blocks, chunk_size=_PAGE)
        self._empty_until_s = 0.0
        try:
            while (names := await self._next_of(pages)) is not None:
                if names:
                    return
        except InvalidPathError:  # of an object that is none of ours: there may be blocks beside it
            return
        self._empty_until_s = time.monotonic() + _EMPTY_S

    async def ask_for_absent(self) -> None:
        """Ask for a block that nobody has."""
        await self._exists(secrets.token_bytes(STORED_KEY_BYTES))

    def probe(self) -> Probe:
        """An object of this opening alone."""
        return Probe(self._store, f"{self._prefix}probe/")

    async def _read_record(self) -> VersionedRecord | None:
        found = await record.read(self._store, self._record)
        if found is None:  # of a service that has lost everything, or of one that somebody has deleted it from
            await self.look()
        return found

    def _noted(self, found: list[bool]) -> list[bool]:
        if any(found):
            self._empty_until_s = 0.0
        return found

    def _path(self, key: bytes) -> str:
        return f"{self._blocks}{key[:PREFIX_BYTES].hex()}/{key[PREFIX_BYTES:].hex()}"

    async def _exists(self, key: bytes) -> bool:
        try:
            await obstore.head_async(self._store, self._path(key))
        except FileNotFoundError:
            return False
        return True

    async def _get(self, block: Block, gate: asyncio.Semaphore) -> Result:
        async with gate:
            try:
                answer = await obstore.get_async(self._store, self._path(block.key))
                if answer.meta["size"] != block.size_bytes:
                    return WRONG
                value = memoryview(await answer.buffer_async())
            except FileNotFoundError:
                return ABSENT
            start = 0
            for part in block.parts:
                part[:] = value[start : start + part.nbytes]
                start += part.nbytes
            return DONE

    async def _put(self, block: Block, gate: asyncio.Semaphore) -> Result:
        async with gate:
            body = b"".join(block.parts)
            await obstore.put_async(self._store, self._path(block.key), body, use_multipart=False)
            return DONE

    async def _delete(self, paths: list[str]) -> int:
        if paths:
            await obstore.delete_async(self._store, paths)
        return len(paths)

    async def _next_of(self, pages: ListStream[Sequence[ObjectMeta]]) -> list[str] | None:
        """Names of blocks in the next page; other objects are left out. None behind the last page."""
        try:
            page = await anext(pages)
        except StopAsyncIteration:
            return None
        names = [each["path"] for each in page]
        return [name for name in names if _NAME.fullmatch(name.removeprefix(self._blocks))]


def _gate(blocks: Sequence[Block]) -> asyncio.Semaphore:
    """Lets in as many requests for blocks as may have their bodies in memory."""
    largest = max((block.size_bytes for block in blocks), default=1)
    return asyncio.Semaphore(max(IN_FLIGHT_BYTES_MAX // largest, 1))


def _results(outcomes: Sequence[Result | BaseException]) -> list[Result]:
    return [each if isinstance(each, Result) else result_of(each) for each in outcomes]


def _store(settings: S3Settings) -> S3Store:
    """The library's access to the bucket."""
    client: ClientConfig = {"timeout": _REQUEST_TIMEOUT, "allow_http": settings.service.startswith("http:")}
    keys = None
    if settings.credentials_file is not None:
        keys = FileCredentials(settings.credentials_file, settings.profile)
    config: S3Config = {
        "region": settings.region,
        "virtual_hosted_style_request": not settings.has_bucket_in_path,
        # Variables of the environment do not count, whoever opens this: neither for the place that blocks go to, nor
        # for signatures. `opening` takes away the others.
        "aws_endpoint_url_s3": settings.bucket_endpoint,
        "skip_signature": False,
    }
    try:
        if settings.ca_file is not None:
            client["root_certificate"] = settings.ca_file.read_bytes()
        return S3Store(
            settings.bucket, config=config, client_options=client, retry_config=_RETRY, credential_provider=keys
        )
    except OSError as error:
        raise StorageUnusable(f"s3 storage: ca_file {settings.ca_file}: {error.strerror}; name a PEM file") from error
    except (ValueError, BaseError) as error:
        raise StorageUnusable(f"s3 storage: {str(error).splitlines()[0]}") from error
