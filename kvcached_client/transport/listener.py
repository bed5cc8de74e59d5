"""Who listens at a local socket: told apart are nobody, another user's daemon, and one that does not answer."""

from __future__ import annotations

import os
import pwd
import socket
import struct
from pathlib import Path
from typing import Final, NamedTuple

from kvcached_client.errors import DaemonSilent, DaemonUnreachable, ErrorCode, RequestError, request_error

#: struct ucred: pid, uid, gid
_CREDENTIALS: Final = struct.Struct("iII")


class Listener(NamedTuple):
    """The process that called listen(); `pid` is 0 where it is not to be seen from here."""

    pid: int
    user: int


def find_listener(path: str) -> Listener | None:
    """Who listens at `path`; None where so many wait there that no more are let in.

    Raises:
        DaemonUnreachable: nobody does.
        Refused: this user may not connect.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.settimeout(0)
        try:
            trial.connect(path)
        except BlockingIOError:
            return None
        except FileNotFoundError:
            raise DaemonUnreachable(f"no socket {path}; is the daemon running?") from None
        except PermissionError as error:
            raise _not_allowed(path, error) from None
        except OSError as error:
            raise DaemonUnreachable(f"{path}: {error.strerror}; is the daemon running?") from error
        credentials = trial.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    return Listener(pid, user)


def check_own(path: str) -> None:
    """Refuse another user's daemon, which would close the connection without a word. Root is no exception.

    Raises:
        DaemonUnreachable, Refused: as `find_listener`.
    """
    listener = find_listener(path)
    if listener is not None and listener.user != os.geteuid():
        raise _others(f"the daemon at {path}", listener.user)


def silent(path: str, deadline_ms: int) -> DaemonUnreachable:
    """The error for a request that nobody took in time: somebody listens and does not answer, or nobody is there."""
    try:
        listener = find_listener(path)
    except DaemonUnreachable as error:
        return error
    except RequestError:
        listener = None
    who = f"process {listener.pid}" if listener is not None and listener.pid else "a process"
    why = "it hangs, or has more to do than it can; see its log, or restart it"
    if listener is not None and _is_stopped(listener.pid):
        why = f"it is stopped (SIGSTOP, or a debugger); kill -CONT {listener.pid} lets it go on"
    return DaemonSilent(f"{who} listens at {path}, but took no request for {deadline_ms} ms: {why}")


def _not_allowed(path: str, error: PermissionError) -> DaemonUnreachable | RequestError:
    """The first of the path's parts, from its end, that can be seen at all is what keeps this user out."""
    for place in (Path(path), *Path(path).parents):
        try:
            owner = place.stat().st_uid
        except OSError:
            continue
        if owner != os.geteuid():
            return _others(str(place), owner)
        break
    return DaemonUnreachable(f"{path}: {error.strerror}; run this as the daemon's user")


def _others(what: str, user: int) -> RequestError:
    own = os.geteuid()
    return request_error(
        ErrorCode.UNAUTHENTICATED,
        f"{what} belongs to {_user(user)}, and this is {_user(own)}: a daemon serves its own user only",
        f"run this as that user, as with: sudo -u '#{user}' …",
    )


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name} ({number})"
    except KeyError:
        return f"user {number}"


def _is_stopped(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in {"T", "t"}
