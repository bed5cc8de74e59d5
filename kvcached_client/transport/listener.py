"""Who listens at a local socket: nobody, a daemon that this process may trust, or one that does not reply."""

from __future__ import annotations

import os
import pwd
import resource
import socket
import stat
import struct
from operator import index
from pathlib import Path
from typing import Final, NamedTuple

from kvcached_client.errors import DaemonSilent, DaemonUnreachable, ErrorCode, RequestError, request_error

#: struct ucred: pid, uid, gid
_CREDENTIALS: Final = struct.Struct("iII")
#: struct timeval
_TIMEVAL: Final = struct.Struct("@ll")
#: The longest wait of poll(2).
DEADLINE_MS_MAX: Final = (1 << 31) - 1
#: What to do where nobody listens.
START_IT: Final = "start the daemon (kvcached supervise --config FILE), or name its run directory: KVCACHED_RUN_DIR"


class Listener(NamedTuple):
    """The process that called listen(); `pid` is 0 if it is in another pid namespace."""

    pid: int
    user: int


def find_listener(path: str) -> Listener | None:
    """The listener at `path`; None if its queue of connections is full.

    Raises:
        DaemonUnreachable: nobody listens, or this process has no descriptor left.
        Refused: this user may not connect.
    """
    with local_socket(path, socket.SOCK_STREAM) as trial:
        trial.settimeout(0)
        try:
            trial.connect(path)
        except BlockingIOError:
            return None
        except PermissionError as error:
            raise not_allowed(path, error) from None
        except OSError as error:
            raise unreachable(path, error) from error
        return listener_of(trial)


def listener_of(connection: socket.socket) -> Listener:
    """The listener that accepted, or will accept, a connection."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    return Listener(pid, user)


def check_deadline(deadline_ms: object) -> int:
    """A deadline as an int: not one that has passed before anything is sent, nor one that is too far to wait for.

    Raises:
        ValueError: it is no whole number, less than 1 ms, or more than `DEADLINE_MS_MAX`.
    """
    try:
        number = None if isinstance(deadline_ms, bool) else index(deadline_ms)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise ValueError(f"deadline_ms is {deadline_ms!r}, a whole number is needed")
    if number < 1:
        raise ValueError(f"deadline_ms is {number}, at least 1 is needed")
    if number > DEADLINE_MS_MAX:
        raise ValueError(f"deadline_ms is {number}, at most {DEADLINE_MS_MAX}, 24 days, is possible")
    return number


def local_socket(path: str, kind: socket.SocketKind) -> socket.socket:
    """A new socket for a connection to `path`.

    Raises:
        DaemonUnreachable: the kernel gives this process none.
    """
    try:
        return socket.socket(socket.AF_UNIX, kind)
    except OSError as error:
        raise no_descriptor(path, str(error.strerror)) from error


def no_descriptor(path: str, why: str) -> DaemonUnreachable:
    """The exception for a daemon that this process cannot reach because it has too many files open."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return DaemonUnreachable(
        f"{path}: {why}: this process may have {most} files open", fix="close some, or raise the limit (ulimit -n)"
    )


def unreachable(path: str, error: OSError) -> DaemonUnreachable:
    """The exception for an error of a socket that connects to `path`."""
    if isinstance(error, FileNotFoundError):
        return DaemonUnreachable(f"no socket {path}", fix=START_IT)
    return DaemonUnreachable(f"{path}: {error.strerror}", fix=START_IT)


def connect(path: str, *, deadline_ms: int) -> socket.socket:
    """A connection to a daemon, which does not block. Whether it serves this user is the daemon's decision.

    Raises:
        DaemonUnreachable: nobody listens, nobody takes the connection in time, or this process has no descriptor left.
        Refused: see `check_trusted`; or this user may not reach the socket.
    """
    connection = local_socket(path, socket.SOCK_STREAM)
    try:
        # With Python's own timeout, a full queue of connections would fail at once; so the kernel waits.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(*divmod(deadline_ms * 1000, 10**6)))
        connection.connect(path)
        check_trusted(connection, path)
        connection.setblocking(False)  # noqa: FBT003
    except BaseException as error:
        connection.close()
        if isinstance(error, BlockingIOError):
            raise silent(path, deadline_ms) from None
        if isinstance(error, PermissionError):
            raise not_allowed(path, error) from None
        if isinstance(error, OSError):
            raise unreachable(path, error) from error
        raise
    return connection


def check_trusted(connection: socket.socket, path: str) -> None:
    """Refuse a daemon that anybody may have started: anybody may make a directory in /tmp.

    Trusted are root, this user, and the owner of the run directory if no other user can have put it there: whoever
    names the directory names its owner.

    Raises:
        Refused: it is none of them.
    """
    user, own = listener_of(connection).user, os.geteuid()
    if user in {0, own}:
        return
    run_dir = Path(path).parent
    fault = fault_of(run_dir, user)
    if fault:
        raise request_error(
            ErrorCode.UNAUTHENTICATED,
            f"the daemon at {path} belongs to {user_in_words(user)}, but this process runs as {user_in_words(own)}, "
            f"and anybody may have put it there: {fault}",
            f"put the run directory where only root can, such as in /run; or run this with {_sudo(user)} …",
        )


def fault_of(run_dir: Path, user: int) -> str:
    """Why somebody else may have put a run directory of `user` there; empty if nobody can have."""
    if (owner := run_dir.stat().st_uid) != user:
        return f"{run_dir} belongs to {user_in_words(owner)}"
    given = run_dir.absolute()
    for place in dict.fromkeys((given, *given.parents, *given.resolve().parents)):
        status = place.stat()
        if status.st_uid not in {0, user, os.geteuid()}:
            return f"{place} belongs to {user_in_words(status.st_uid)}"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"others may write into {place}"
    return ""


def silent(path: str, deadline_ms: int) -> DaemonUnreachable:
    """The error for a request that was not accepted in time: the listener does not reply, or there is none."""
    try:
        listener = find_listener(path)
    except DaemonUnreachable as error:
        return error
    except RequestError:
        listener = None
    return _silence(listener, f"listens at {path}, but accepted no request for {deadline_ms} ms:")


def unanswered(path: str, connection: socket.socket, deadline_ms: int) -> DaemonUnreachable:
    """The error for a connection on which the listener does not reply, or that it does not take."""
    return _silence(listener_of(connection), f"listens at {path}, but did not reply within {deadline_ms} ms:")


def not_allowed(path: str, error: PermissionError) -> DaemonUnreachable | RequestError:
    """The error for a socket that this user may not reach.

    The last part of the path that is visible to this user is the one that denies access.
    """
    for place in (Path(path), *Path(path).parents):
        try:
            owner = place.stat().st_uid
        except OSError:
            continue
        if owner != os.geteuid():
            return _others(str(place), owner)
        break
    return DaemonUnreachable(f"{path}: {error.strerror}", fix="run this as the daemon's user")


def _silence(listener: Listener | None, what: str) -> DaemonSilent:
    who = f"process {listener.pid}" if listener is not None and listener.pid else "a process"
    if listener is not None and _is_stopped(listener.pid):
        fix = f"continue it with kill -CONT {listener.pid}"
        return DaemonSilent(f"{who} {what} it is stopped (SIGSTOP, or a debugger)", fix=fix)
    return DaemonSilent(f"{who} {what} it hangs or is overloaded", fix="see its log, or restart it")


def _others(what: str, user: int) -> RequestError:
    own = user_in_words(os.geteuid())
    return request_error(
        ErrorCode.UNAUTHENTICATED,
        f"{what} belongs to {user_in_words(user)}, but this process runs as {own} and may not pass",
        f"run this as that user: {_sudo(user)} …; or name this user in the table [access] of the daemon's "
        "configuration, and let it through the directories above the run directory",
    )


def user_in_words(number: int) -> str:
    """A user's name and number."""
    name = _name_of(number)
    return f"user {name} ({number})" if name else f"user {number}"


def _sudo(user: int) -> str:
    """The beginning of a command that is to run as a user. A user without a name here is given by number."""
    name = _name_of(user) or f"'#{user}'"
    return f"sudo -u {name}"


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return ""


def _is_stopped(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in {"T", "t"}
