"""Reads and writes the record of generations in the storage process, for daemons that share a backend.

A record can be larger than a message, so it lies in memory of its own, which the daemon and the storage process share.
The daemon sends one request at a time, and leaves the memory alone until it has the answer.
"""

from __future__ import annotations

from typing import Final

from kvcached.storage.backend import RecordUnusable, Storage, VersionedRecord
from kvcached.storage.messages import Done, ReadRecord, WriteRecord

#: Of what a service calls a version: it goes into a message.
VERSION_BYTES_MAX: Final = 1024


class SharedRecords:
    """The record of one backend.

    Args:
        memory: for the record.
        backend: that keeps it.
        timeout_s: how long one call of the backend may take.
    """

    def __init__(self, memory: memoryview, backend: Storage, timeout_s: float) -> None:
        self._memory = memory
        self._backend = backend
        self._timeout_s = timeout_s

    def carry_out(self, request: ReadRecord | WriteRecord) -> Done:
        """Read or write the record.

        Raises:
            Exception: the backend cannot, or keeps what is no record.
        """
        if isinstance(request, ReadRecord):
            return self._read(request.sequence, request.known)
        data = bytes(self._memory[: request.size_bytes])
        version = self._backend.write_record(data, request.after, timeout_s=self._timeout_s)
        if version is None:
            return self._read(request.sequence, b"")
        return Done(sequence=request.sequence, written=1, version=_checked(version))

    def _read(self, sequence: int, known: bytes) -> Done:
        try:
            record = self._backend.read_record(timeout_s=self._timeout_s)
        except RecordUnusable as error:
            if known and error.version == known:  # which this daemon is about to replace
                return Done(sequence=sequence, version=known)
            return Done(sequence=sequence, version=error.version, error=str(error))
        if record is None:
            return Done(sequence=sequence)
        if _checked(record.version) == known:
            return Done(sequence=sequence, version=known)
        return Done(sequence=sequence, count=self._copied(record), version=record.version)

    def _copied(self, record: VersionedRecord) -> int:
        size_bytes = len(record.data)
        if size_bytes > self._memory.nbytes:
            raise ValueError(f"a record of generations of {size_bytes} bytes, at most {self._memory.nbytes}")
        self._memory[:size_bytes] = record.data
        return size_bytes


def _checked(version: bytes) -> bytes:
    if not 0 < len(version) <= VERSION_BYTES_MAX:
        raise ValueError(f"a version of {len(version)} bytes, 1 to {VERSION_BYTES_MAX}")
    return version
