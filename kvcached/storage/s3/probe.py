"""Tries with an object of its own whether a service does what the record of generations needs.

Each opening has another name, so daemons that open at the same time do not meet. What an opening could not delete, as
where the service hung, a later one deletes.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import obstore
from obstore.exceptions import InvalidPathError

from kvcached.storage.s3 import record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from obstore import ObjectMeta
    from obstore.store import S3Store

#: By the clock of the service. No opening takes as long.
_LEFT_BEHIND: Final = timedelta(hours=1)


class Probe:
    """One object.

    Every method raises what the library raises, or `S3Failure`.
    """

    def __init__(self, store: S3Store, folder: str) -> None:
        self._store = store
        self._folder = folder
        self._path = f"{folder}{secrets.token_hex(16)}"

    async def delete_before(self) -> None:
        """Delete it before it is there: who may not delete has written nothing yet."""
        await obstore.delete_async(self._store, [self._path])

    async def honours_conditions(self) -> bool:
        """Whether the service writes if a condition holds, and only then. A lost answer is looked up, as a record's."""
        version = await record.write(self._store, self._path, b"", b"")
        if version is None:
            return False
        for wrong in (b"", _another(version)):
            if await record.write(self._store, self._path, b"", wrong) is not None:
                return False
        return await record.write(self._store, self._path, b"", version) is not None

    async def remove(self) -> None:
        """Delete it, and what is left of earlier ones."""
        page: Sequence[ObjectMeta] = []
        with suppress(InvalidPathError):  # of an object that is none of ours, which stays, with what lies beside it
            page = await anext(obstore.list(self._store, self._folder), [])
        mine = [each["last_modified"] for each in page if each["path"] == self._path]
        old = [each["path"] for each in page if mine and each["last_modified"] < mine[0] - _LEFT_BEHIND]
        await obstore.delete_async(self._store, [self._path, *old])


def _another(version: bytes) -> bytes:
    """A version of the same form that no object has."""
    digits = version.decode()
    return "".join("0" if each in "123456789abcdef" else "1" if each == "0" else each for each in digits).encode()
