"""Keys of CURVE as text, as ZeroMQ writes them (Z85), and in files that nobody else reads."""

from __future__ import annotations

import base64
import errno
import os
import stat
from pathlib import Path
from typing import Final

from kvcached_client.errors import bad_value

#: 32 bytes as text.
CURVE_KEY_LENGTH: Final = 40
#: What `base64.b85encode` writes, and what ZeroMQ writes (rfc.zeromq.org/spec/32).
_PYTHONS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_ZEROMQS: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_TO_ZEROMQ: Final = str.maketrans(_PYTHONS, _ZEROMQS)
_FROM_ZEROMQ: Final = str.maketrans(_ZEROMQS, _PYTHONS)
_FILE_BYTES_MAX: Final = 1024
_FOR_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_ROOT: Final = 0
#: In an access control list, further users and groups may be let in.
_ACCESS_LIST: Final = "system.posix_acl_access"


def key_text(key: bytes) -> str:
    """A key as text."""
    return base64.b85encode(key).decode("ascii").translate(_TO_ZEROMQ)


def key_of(text: str) -> bytes:
    """The key that a text says.

    Raises:
        ValueError: it is no key.
    """
    if len(text) != CURVE_KEY_LENGTH or not set(text) <= set(_ZEROMQS):
        raise ValueError(f"a key has {CURVE_KEY_LENGTH} characters of Z85")
    return base64.b85decode(text.translate(_FROM_ZEROMQ))


def read_key_file(path: str | os.PathLike[str]) -> bytes:
    """The secret key in a file.

    Raises:
        BadRequest: there is no file, others may read it, or it has no key.
    """
    make = f"make one: kvcached keys make {path}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise bad_value(f"key file {path}: {error.strerror}", f"name the file of a key, or {make}") from None
    try:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):  # whose mode is not to be changed
            raise bad_value(f"key file {path} is a directory", "name the file of a key")
        if not is_private(descriptor):
            raise bad_value(f"key file {path} is not a file that its owner alone can read", f"chmod 600 {path}")
        content = os.read(descriptor, _FILE_BYTES_MAX)
    finally:
        os.close(descriptor)
    try:
        return key_of(content.decode("ascii").strip())
    except ValueError:
        raise bad_value(f"key file {path} has no key of {CURVE_KEY_LENGTH} characters in its only line", make) from None


def is_private(descriptor: int) -> bool:
    """Whether an open file is a regular one that nobody can use but root and this process's user.

    A file of root may be readable by one of this process's groups, too: Kubernetes gives a Secret to a Pod so. Root's
    own group does not count, for it is the group of everybody who was given none.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid not in {_ROOT, os.geteuid()}:
        return False
    granted = status.st_mode & _FOR_OTHERS
    if granted == stat.S_IRGRP and status.st_uid == _ROOT and status.st_gid != _ROOT:
        return status.st_gid in {os.getegid(), *os.getgroups()} and not _has_access_list(descriptor)
    return not granted


def _has_access_list(descriptor: int) -> bool:
    try:
        os.getxattr(descriptor, _ACCESS_LIST)
    except OSError as error:
        return error.errno not in {errno.ENODATA, errno.ENOTSUP}
    return True


def write_key_file(path: Path, secret: bytes) -> None:
    """Write a new file that its owner alone can read.

    Raises:
        OSError: there is something at the path already, or it cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        os.fchmod(descriptor, 0o600)  # whatever the umask takes away
        file.write(f"{key_text(secret)}\n")
        file.flush()
        os.fsync(descriptor)
