"""Files of secrets that settings of backends name: only their owner may read them."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path
from typing import Final

from kvcached.storage.backend import StorageUnusable
from kvcached_client.protocol.key_files import is_private

_FILE_BYTES_MAX: Final = 64 << 10


def read_private(path: Path, whose: str) -> bytes:
    """The content of a file.

    Args:
        path: the file.
        whose: what begins the message, as "redis storage: password_file".

    Raises:
        StorageUnusable: there is no file, it is too large, or others may use it. What to do stands behind "; ".
    """
    name = shlex.quote(str(path))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        fix = "make it, or name another file"
        if isinstance(error, PermissionError):
            fix = f"give the file to the daemon's user: chown {os.geteuid()} {name}"
        raise StorageUnusable(f"{whose}: {path}: {error.strerror}; {fix}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # whose mode is not to be changed
            raise StorageUnusable(f"{whose}: {path} is not a regular file; name a file")
        if not is_private(descriptor):
            own = os.geteuid()
            what = f"others than user {own} may use it, or it belongs to another user"
            raise StorageUnusable(f"{whose}: {path}: {what}; chown {own} {name}; chmod 600 {name}")
        content = os.read(descriptor, _FILE_BYTES_MAX + 1)
    except OSError as error:
        raise StorageUnusable(f"{whose}: {path}: {error.strerror}; name a file") from error
    finally:
        os.close(descriptor)
    if len(content) > _FILE_BYTES_MAX:
        raise StorageUnusable(f"{whose}: {path} has more than {_FILE_BYTES_MAX} bytes; name another file")
    return content
