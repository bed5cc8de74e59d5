"""What the commands share: exit codes, options, and how the daemon is asked."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import click

if TYPE_CHECKING:
    from kvcached_client import Admin
    from kvcached_client.protocol.engine import Header, TreeNode

Reply = TypeVar("Reply")


class ExitCode(IntEnum):
    """What the exit status of a command means. These never change."""

    OK = 0
    UNHEALTHY = 1
    USAGE = 2
    START_FAILED = 3
    UNREACHABLE = 4
    INTERRUPTED = 130

    @property
    def meaning(self) -> str:
        """The code in words."""
        return _MEANINGS[self]


_MEANINGS = {
    ExitCode.OK: "success; health and checks found no problem",
    ExitCode.UNHEALTHY: "a problem was found: unhealthy, violations, differing outputs, a failed check of doctor,"
    " or something left at a deadline",
    ExitCode.USAGE: "wrong usage or configuration; nothing was started",
    ExitCode.START_FAILED: "the start failed; every process that was started has ended",
    ExitCode.UNREACHABLE: "no daemon answered in time",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C; a demo also by SIGTERM (143) or SIGHUP (129)",
}
EPILOG = "\b\nExit codes:\n" + "\n".join(f"{code.value:>5}  {code.meaning}" for code in ExitCode)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.", show_default=True)
run_dir_option = click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    envvar="KVCACHED_RUN_DIR",
    show_envvar=True,
    show_default="$RUNTIME_DIRECTORY, $XDG_RUNTIME_DIR/kvcached, /tmp/kvcached-<uid>",
    help="Directory of the daemon's sockets.",
)
deadline_option = click.option(
    "--deadline-ms",
    type=click.IntRange(1, 600_000),
    default=5000,
    show_default=True,
    help="Longest wait for the answer, in milliseconds.",
)


def ask(run_dir: Path | None, deadline_ms: int, question: Callable[[Admin], Reply]) -> Reply:
    """The daemon's answer; whatever goes wrong ends the program."""
    from kvcached_client import Admin, BadRequest, DeadlineExceeded, ErrorCode, RequestError, TransportError
    from kvcached_client.errors import DaemonSilent

    try:
        with Admin.connect(run_dir, deadline_ms=deadline_ms) as admin:
            return question(admin)
    except RequestError as error:
        is_usage = isinstance(error, BadRequest)
        is_usage = is_usage or error.code in {ErrorCode.UNKNOWN_REPLICA, ErrorCode.UNAUTHENTICATED}
        fail(ExitCode.USAGE if is_usage else ExitCode.UNHEALTHY, str(error))
    except DeadlineExceeded as error:
        fail(ExitCode.UNREACHABLE, f"{error} (see the daemon's log, or allow more time with --deadline-ms)")
    except DaemonSilent as error:
        fail(ExitCode.UNREACHABLE, str(error))
    except TransportError as error:
        fail(ExitCode.UNREACHABLE, f"{error} (start it with: kvcached serve --config FILE)")


def fail(code: ExitCode, message: str) -> NoReturn:
    """End the program with the reason on stderr."""
    try:
        for line in message.splitlines():
            click.echo(f"kvcached: {line}", err=True)
    except OSError:  # nobody can be told; at an exit in order, what could not be written would make another status
        os._exit(code)
    sys.exit(code)


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(value))


def fields_of(message: Header | TreeNode) -> dict[str, object]:
    """A message as JSON types: bytes as hex digits, and without what belongs to its transport."""
    import msgspec

    fields = {name: getattr(message, name) for name in message.__struct_fields__ if name != "id"}
    return {
        name: value.hex() if isinstance(value, bytes) else msgspec.to_builtins(value) for name, value in fields.items()
    }
