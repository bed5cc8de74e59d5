"""Descriptors that the service manager keeps while the daemon is dead: systemd's store, and `kvcached supervise`'s.

A stored memfd keeps its memory, so that the next daemon has the blocks of the one before it. What was stored comes back
at the next start as descriptors from 3 on, with three variables that say how many, under which names, and for which
process.
"""

from __future__ import annotations

import errno
import logging
import os
from typing import Final

from kvcached.notify import notify

#: More than any daemon stores: a larger number is a mistake.
DESCRIPTORS_MAX: Final = 1024
FIRST_DESCRIPTOR: Final = 3
#: Set by whoever starts the daemon.
PID_VARIABLE: Final = "LISTEN_PID"
COUNT_VARIABLE: Final = "LISTEN_FDS"
NAMES_VARIABLE: Final = "LISTEN_FDNAMES"
VARIABLES: Final = (PID_VARIABLE, COUNT_VARIABLE, NAMES_VARIABLE)
#: What systemd calls descriptors without a name.
UNNAMED: Final = "unknown"
NAME_LENGTH_MAX: Final = 255

_log: Final = logging.getLogger(__name__)


def take_stored() -> dict[str, list[int]]:
    """The descriptors that the manager gives back, by name; close-on-exec, and the caller's to close.

    Comes before the process opens anything else. The variables leave the environment, so that no child takes them for
    its own, and a second call gives nothing. Values that make no sense are logged, and what they say is not believed.
    """
    pid, count, names = (os.environ.pop(variable, "") for variable in VARIABLES)
    if pid != str(os.getpid()):
        if pid:
            _log.warning("%s=%s is not this process (%d): descriptors not taken", PID_VARIABLE, pid, os.getpid())
        return {}
    if not (count.isdecimal() and count.isascii() and len(count) <= NAME_LENGTH_MAX and int(count) <= DESCRIPTORS_MAX):
        _log.warning("%s=%s is no number up to %d: descriptors not taken", COUNT_VARIABLE, count, DESCRIPTORS_MAX)
        return {}
    descriptors = range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + int(count))
    return _by_name(descriptors, names)


def store(name: str, descriptor: int) -> bool:
    """Ask the manager to keep a duplicate of a descriptor under a name, until `remove` or the service's end.

    The same file twice under one name is kept once.

    Returns:
        Whether somebody was asked; False where there is no manager.

    Raises:
        ValueError: the name cannot be sent.
    """
    return notify(f"FDSTORE=1\nFDNAME={_checked(name)}\nFDPOLL=0", (descriptor,))


def remove(name: str) -> bool:
    """Ask the manager to close what it keeps under a name. Returns and raises as `store`."""
    return notify(f"FDSTOREREMOVE=1\nFDNAME={_checked(name)}")


def is_name(name: str) -> bool:
    """Whether descriptors may be called so: 1 to 255 printable ASCII characters, no colon."""
    return 0 < len(name) <= NAME_LENGTH_MAX and name.isascii() and name.isprintable() and ":" not in name


def _checked(name: str) -> str:
    if not is_name(name):
        raise ValueError(f"{name!r} is no name for a descriptor: give up to 255 ASCII characters without colons")
    return name


def _by_name(descriptors: range, names: str) -> dict[str, list[int]]:
    called = names.split(":") if names else []
    if len(called) != len(descriptors):
        if called:
            _log.warning("%s has %d names for %d descriptors: not used", NAMES_VARIABLE, len(called), len(descriptors))
        called = [UNNAMED] * len(descriptors)
    found: dict[str, list[int]] = {}
    for name, descriptor in zip(called, descriptors, strict=True):
        try:
            os.set_inheritable(descriptor, False)  # noqa: FBT003 - takes no keyword
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            _log.warning("descriptor %d (%s) was announced and is not there", descriptor, name)
        else:
            found.setdefault(name, []).append(descriptor)
    return found
