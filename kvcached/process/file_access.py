"""Lets users and groups reach a file or a directory of this user: by an access control list, and nobody else.

Where the file system has no such lists, everybody is let in: a socket then relies on what it asks the kernel about each
peer, which decides in any case.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import struct
from pathlib import Path
from typing import Final

from kvcached.process.access import Users

#: The permissions that somebody needs: to connect to a socket, and to go through a directory to it.
CONNECT: Final = os.W_OK
PASS: Final = os.X_OK

_ATTRIBUTE: Final = "system.posix_acl_access"
_VERSION: Final = struct.Struct("<I")
_ENTRY: Final = struct.Struct("<HHI")  #: tag, permissions, id
_USER_OWNER, _USER, _GROUP_OWNER, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
_NO_ID: Final = 0xFFFFFFFF
_ALL: Final = 7

_log: Final = logging.getLogger(__name__)


def let_in(path: str | Path, users: Users, permission: int) -> None:
    """Give users and groups one permission on a file of this user, beside what others have.

    A list that the file has already is kept: these users are added to it. Entries that mean nothing in this user
    namespace cannot be written again, and are dropped.

    Raises:
        OSError: the file is not this user's, or an id means nothing in this user namespace.
    """
    if not users.uids and not users.gids:
        return
    mode = stat.S_IMODE(os.stat(path).st_mode)  # noqa: PTH116 - a path of a socket is text
    try:
        entries = _entries(path, mode)
        for tag, ids in ((_USER, users.uids), (_GROUP, users.gids)):
            for number in ids:
                entries[tag, number] = entries.get((tag, number), 0) | permission
        named = [bits for (tag, _), bits in entries.items() if tag in {_USER, _GROUP, _GROUP_OWNER}]
        entries[_MASK, _NO_ID] = _union(named)
        packed = b"".join(_ENTRY.pack(tag, bits, number) for (tag, number), bits in sorted(entries.items()))
        os.setxattr(path, _ATTRIBUTE, _VERSION.pack(2) + packed)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise OSError(error.errno, f"{error.strerror}: access to {path} cannot be given") from error
        _log.info("%s: its file system has no access control lists, so every user may reach it", path)
        os.chmod(path, mode | permission << 3 | permission)  # noqa: PTH101 - as above; a group's members are no others


def _entries(path: str | Path, mode: int) -> dict[tuple[int, int], int]:
    """The list of a file, by tag and id; where it has none, what its mode says."""
    try:
        packed = os.getxattr(path, _ATTRIBUTE)
    except OSError as error:
        if error.errno != errno.ENODATA:
            raise
        bits = ((_USER_OWNER, mode >> 6), (_GROUP_OWNER, mode >> 3), (_OTHER, mode))
        return {(tag, _NO_ID): each & _ALL for tag, each in bits}
    found = {(tag, number): bits for tag, bits, number in _ENTRY.iter_unpack(packed[_VERSION.size :])}
    # The kernel shows every user and group that has no number here under this one, and takes no list with it.
    return {each: bits for each, bits in found.items() if each not in {(_USER, _NO_ID), (_GROUP, _NO_ID)}}


def _union(permissions: list[int]) -> int:
    together = 0
    for each in permissions:
        together |= each
    return together
