"""Keys of a service, from the file that AWS's own programs share.

The file is read again from time to time: keys are replaced, and those of a session expire.
"""

from __future__ import annotations

import configparser
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvcached.storage.backend import StorageUnusable
from kvcached.storage.secret_file import read_private

if TYPE_CHECKING:
    from obstore.store import S3Credential

#: How long keys are used before the file is read again: it takes so long until a session goes on with its next keys.
KEEP: Final = timedelta(seconds=10)
#: The library asks for new keys so long before the end of those that it has.
_LEAD: Final = timedelta(minutes=5)
_ID, _SECRET, _TOKEN = "aws_access_key_id", "aws_secret_access_key", "aws_session_token"

_log: Final = logging.getLogger(__name__)


class FileCredentials:
    """Gives the keys of one profile to the library, which calls it when it has none or they are old."""

    def __init__(self, path: Path, profile: str) -> None:
        """Read the file.

        Raises:
            StorageUnusable: there is no file, others may read it, or it has no such keys.
        """
        self._path = path
        self._profile = profile
        self._keys = _read(path, profile)
        self._told = ""  #: why it could not be read the last time

    def __call__(self) -> S3Credential:
        """The keys in the file now; those of before where it cannot be read, as while somebody replaces it."""
        try:
            self._keys, self._told = _read(self._path, self._profile), ""
        except StorageUnusable as error:
            if self._told != str(error):  # once, and not at each attempt
                _log.warning("%s; the keys from before are used", error)
            self._told = str(error)
        return {
            "access_key_id": self._keys[_ID],
            "secret_access_key": self._keys[_SECRET],
            "token": self._keys.get(_TOKEN),
            "expires_at": datetime.now(UTC) + KEEP + _LEAD,
        }


def _read(path: Path, profile: str) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(read_private(path, "s3 storage: credentials_file").decode())
    except (configparser.Error, UnicodeDecodeError):  # whose text may show a secret
        raise StorageUnusable(
            f"s3 storage: {path} is no credentials file; it has lines [{profile}], {_ID} = … and {_SECRET} = …"
        ) from None
    keys = dict(parser[profile]) if parser.has_section(profile) else {}
    missing = [name for name in (_ID, _SECRET) if not keys.get(name)]
    if missing:
        raise StorageUnusable(
            f"s3 storage: {path} has no {' and no '.join(missing)} in [{profile}]; add it, or name another profile"
        )
    return keys
