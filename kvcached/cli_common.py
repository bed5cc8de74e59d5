"""What the commands share: exit codes, options, and how the daemon is asked."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import click

if TYPE_CHECKING:
    from kvcached_client import Admin
    from kvcached_client.protocol import Header, TreeNode

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
    ExitCode.OK: "done; what was asked about is in order",
    ExitCode.UNHEALTHY: "something is wrong: unhealthy, violations, differing outputs, a check of doctor that failed,"
    " something left at a deadline",
    ExitCode.USAGE: "wrong usage or configuration; nothing was started",
    ExitCode.START_FAILED: "the start failed; everything that was started has ended",
    ExitCode.UNREACHABLE: "no daemon answered in time",
    ExitCode.INTERRUPTED: "ended by Ctrl-C before it was done; a demo also by SIGTERM (143) or SIGHUP (129)",
}
EPILOG = "\b\nExit codes:\n" + "\n".join(f"{code.value:>5}  {code.meaning}" for code in ExitCode)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.", show_default=True)
run_dir_option = click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    envvar="KVCACHED_RUN_DIR",
    show_envvar=True,
    show_default="$RUNTIME_DIRECTORY, $XDG_RUNTIME_DIR/kvcached, /tmp/kvcached-<uid>",
    help="Folder of the daemon's sockets.",
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

    try:
        with Admin.connect(run_dir, deadline_ms=deadline_ms) as admin:
            return question(admin)
    except RequestError as error:
        is_usage = isinstance(error, BadRequest) or error.code is ErrorCode.UNKNOWN_REPLICA
        fail(ExitCode.USAGE if is_usage else ExitCode.UNHEALTHY, str(error))
    except DeadlineExceeded as error:
        fail(ExitCode.UNREACHABLE, f"{error} (see the daemon's log, or allow more with --deadline-ms)")
    except TransportError as error:
        fail(ExitCode.UNREACHABLE, f"{error} (start it with: kvcached serve --config FILE)")


def fail(code: ExitCode, message: str) -> NoReturn:
    """End the program with the reason on stderr."""
    for line in message.splitlines():
        click.echo(f"kvcached: {line}", err=True)
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
