"""Reads and writes the record of generations in the storage process, for daemons that share a backend.

A record can be larger than a message, so it lies in memory of its own, which the daemon and the storage process share.
The daemon sends one request at a time, and leaves the memory alone until it has the answer.
"""

from __future__ import annotations

from typing import Final

from kvcached.storage.backend import RecordUnusable, Storage
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
            Exception: the backend cannot, or tells a version that cannot be sent.
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
        if (size_bytes := len(record.data)) > self._memory.nbytes:
            why = f"it has {size_bytes} bytes, and a record of generations at most {self._memory.nbytes}"
            return Done(sequence=sequence, version=record.version, error=why)
        self._memory[:size_bytes] = record.data
        return Done(sequence=sequence, count=size_bytes, version=record.version)


def _checked(version: bytes) -> bytes:
    if not 0 < len(version) <= VERSION_BYTES_MAX:
        raise ValueError(f"a version of {len(version)} bytes, 1 to {VERSION_BYTES_MAX}")
    return version
