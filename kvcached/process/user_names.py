"""The number behind the name of a user or a group, where this machine and this user namespace have one.

The kernel refuses an access control list with a number that this user namespace does not have, and shows every peer
without a number here under the same one.
"""

from __future__ import annotations

import grp
import pwd
from pathlib import Path
from typing import Final

#: Begins the name of a group.
GROUP_SIGN: Final = "@"
#: (uid_t) -1 and (gid_t) -1 are nobody's.
_ID_MAX: Final = (1 << 32) - 2
_UIDS: Final = "uid_map"
_GIDS: Final = "gid_map"
#: The map of the initial user namespace, which has every number.
_EVERY: Final = [(0, 0, (1 << 32) - 1)]
_IN_NAMESPACE: Final = "name another one, or map it into the user namespace of the daemon"

_own = Path("/proc/self")
_kernel = Path("/proc/sys/kernel")


class UnknownUser(Exception):
    """Somebody whom this machine, or this user namespace, does not know. The message says why.

    Attributes:
        fix: what to do.
    """

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.fix = fix


def resolve(name: str) -> tuple[int, bool]:
    """The number behind a user's name or number, or that of a group behind ``@``; and whether it is a group.

    Raises:
        UnknownUser: there is no such user or group, or it has no number of its own in this user namespace.
    """
    is_group = name.startswith(GROUP_SIGN)
    kind, plain = ("group", name[1:]) if is_group else ("user", name)
    fix = f"correct the name, make the {kind}, or write its number"
    if plain.isascii() and plain.isdecimal():
        number = int(plain)
        if number > _ID_MAX:
            raise UnknownUser(f"is no number of a {kind}", fix)
    else:
        try:
            number = grp.getgrnam(plain).gr_gid if is_group else pwd.getpwnam(plain).pw_uid
        except KeyError:
            raise UnknownUser(f"is no {kind} of this machine", fix) from None
    if not is_group and number == _overflow_uid():
        raise UnknownUser("stands for every user whom this user namespace does not know", _IN_NAMESPACE)
    if not _is_mapped(number, _GIDS if is_group else _UIDS):
        raise UnknownUser(f"is a {kind} without a number in this user namespace", _IN_NAMESPACE)
    return number, is_group


def _is_mapped(number: int, name: str) -> bool:
    """Whether a map has a number; true where the kernel does not say."""
    ranges = _ranges(name)
    return ranges is None or any(first <= number < first + count for first, _, count in ranges)


def _overflow_uid() -> int | None:
    """The user as whom the kernel shows users that have no number here; None where all have one."""
    if _ranges(_UIDS) in (None, _EVERY):
        return None
    try:
        return int((_kernel / "overflowuid").read_text())
    except OSError:
        return None


def _ranges(name: str) -> list[tuple[int, int, int]] | None:
    """The lines of a map: the first number here, the same one outside, and how many follow each other."""
    try:
        lines = (_own / name).read_text().splitlines()
    except OSError:
        return None
    return [(int(first), int(outside), int(count)) for first, outside, count in map(str.split, lines)]
