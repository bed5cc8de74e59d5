"""What the commands share: exit codes, options, how a prompt is given, and how the daemon is asked."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from enum import IntEnum
from pathlib import Path
from string import hexdigits
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TextIO, TypeVar

import click
from click.core import ParameterSource

from kvcached.log import escaped

if TYPE_CHECKING:
    from kvcached.cli.prompt_keys import Prompt
    from kvcached_client import Admin, TransportError
    from kvcached_client.protocol.engine import Header, TreeNode
    from kvcached_client.vllm.keys import VllmHashing

Reply = TypeVar("Reply")


class ExitCode(IntEnum):
    """What the exit status of a command means. These never change."""

    OK = 0
    UNHEALTHY = 1
    USAGE = 2
    START_FAILED = 3
    UNREACHABLE = 4
    INTERRUPTED = 130
    NO_READER = 141

    @property
    def meaning(self) -> str:
        """The code in words."""
        return _MEANINGS[self]


_MEANINGS = {
    ExitCode.OK: "success; health and checks found no problem",
    ExitCode.UNHEALTHY: "a problem was found: unhealthy, violations, differing outputs, a failed check of doctor,"
    " or something left at a deadline",
    ExitCode.USAGE: "wrong usage or configuration, or output that cannot be written; nothing was started",
    ExitCode.START_FAILED: "the start failed; every process that was started has ended",
    ExitCode.UNREACHABLE: "no daemon answered in time",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C; a demo also by SIGTERM (143) or SIGHUP (129)",
    ExitCode.NO_READER: "nobody reads the output any more, as behind head; a shell says the same of SIGPIPE",
}
EPILOG = "\b\nExit codes:\n" + "\n".join(f"{code.value:>5}  {code.meaning}" for code in ExitCode)


class Seconds(click.FloatRange):
    """A time between two questions to a daemon. click's own range lets NaN pass."""

    def convert(self, value: float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, or wrong usage."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is no number of seconds", param, ctx)
        return float(number)


#: Between two questions to a daemon.
INTERVAL_S: Final = Seconds(0.1, 3600)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.", show_default=True)
run_dir_option = click.option(
    "--run-dir",
    # A user with a role may pass the directory, not list it: the daemon's list of permissions says no more.
    type=click.Path(path_type=Path, readable=False),
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


class Remote(NamedTuple):
    """The daemon on another machine that commands are for: the options before the command's name."""

    endpoint: str
    server_key: str
    key_file: Path | None


def remote_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of the program that name a daemon on another machine."""
    options = (
        click.option(
            "--endpoint",
            metavar="tcp://HOST:PORT",
            envvar="KVCACHED_ENDPOINT",
            show_envvar=True,
            help="Ask a daemon on another machine; needs [tcp] there, and the next two here.",
        ),
        click.option(
            "--server-key",
            default="",
            envvar="KVCACHED_SERVER_KEY",
            show_envvar=True,
            help="That daemon's public key, in single quotes.",
        ),
        click.option(
            "--key-file",
            type=click.Path(path_type=Path),
            envvar="KVCACHED_KEY_FILE",
            show_envvar=True,
            help="This client's key, of `kvcached keys make`.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def remote() -> Remote | None:
    """The daemon on another machine that the program was told of, if any.

    Raises:
        click.UsageError: the command line also names a run directory.
    """
    context = click.get_current_context()
    found = context.find_object(Remote)
    here, there = context.get_parameter_source("run_dir"), context.find_root().get_parameter_source("endpoint")
    if found is None or here is not ParameterSource.COMMANDLINE:
        return found
    if there is ParameterSource.COMMANDLINE:
        raise click.UsageError("--endpoint names a daemon on another machine, and --run-dir one here: give one of them")
    return None


def connect(run_dir: Path | None, deadline_ms: int) -> Admin:
    """A connection to the daemon that the command is for."""
    from kvcached_client import Admin

    there = remote()
    if there is None:
        return Admin.connect(run_dir, deadline_ms=deadline_ms)
    where, keys = there.endpoint, there.key_file
    return Admin.connect(where, server_key=there.server_key, key_file=keys, deadline_ms=deadline_ms)


def ask(run_dir: Path | None, deadline_ms: int, question: Callable[[Admin], Reply]) -> Reply:
    """The daemon's answer; whatever goes wrong ends the program."""
    from kvcached_client import BadRequest, DeadlineExceeded, RequestError, TransportError
    from kvcached_client.errors import DaemonSilent

    try:
        with connect(run_dir, deadline_ms) as admin:
            return question(admin)
    except RequestError as error:
        is_usage = isinstance(error, BadRequest)
        is_usage = is_usage or error.code in {"unknown_replica", "unauthenticated", "forbidden"}
        fail(ExitCode.USAGE if is_usage else ExitCode.UNHEALTHY, str(error))
    except DeadlineExceeded as error:
        fail(ExitCode.UNREACHABLE, f"{error} (see the daemon's log, or allow more time with --deadline-ms)")
    except DaemonSilent as error:
        fail(ExitCode.UNREACHABLE, str(error))
    except TransportError as error:
        fail(ExitCode.UNREACHABLE, _unreachable(error, run_dir))


def _unreachable(error: TransportError, run_dir: Path | None) -> str:
    """Why no daemon answers, and what to do. To start a second daemon beside one that runs would fail."""
    from kvcached.recovery.run_dir import is_claimed
    from kvcached_client.transport.listener import START_IT
    from kvcached_client.transport.run_dir import default_run_dir

    if remote() is not None:
        return str(error)
    if error.fix in {"", START_IT} and is_claimed(run_dir or default_run_dir()):
        way_out = "a daemon has this run directory: it starts or stops, or its sockets were removed; then restart it"
        return f"{error.message} ({way_out})"
    return str(error) if error.fix else f"{error}; {START_IT}"


def owner_of(run_dir: Path | None) -> str:
    """The user whose daemon has answered; empty if that is this user, or the directory is gone meanwhile."""
    from kvcached_client.transport.listener import user_in_words
    from kvcached_client.transport.run_dir import default_run_dir

    if remote() is not None:
        return ""
    try:
        owner = (run_dir or default_run_dir()).stat().st_uid
    except OSError:
        return ""
    return "" if owner == os.geteuid() else user_in_words(owner)


def fail(code: ExitCode, message: str) -> NoReturn:
    """End the program with the reason on stderr. A daemon's words may hold names that its engines chose."""
    try:
        for line in message.rstrip("\n").split("\n"):
            click.echo(f"kvcached: {escaped(line)}", err=True)
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


#: Of a key, and of a vLLM block hash whose first half is the key.
_KEY_DIGITS: Final = (32, 64)

_PROMPT_OPTIONS: Final = (
    click.option("--tokens", type=click.File(), help="File with the prompt's token ids: JSON, or separated by spaces."),
    click.option(
        "--keys", type=click.File(), help="File with the keys of the prompt's full blocks instead: hex, one per line."
    ),
    click.option("--salt", default="", show_default="none", help="The request's cache salt."),
    click.option("--lora", default="", show_default="none", help="The request's adapter; for vLLM name:path."),
    click.option(
        "--engine",
        type=click.Choice(["kvcached", "vllm"]),
        default="kvcached",
        show_default=True,
        help="Which keys to compute: those of kvcached_client, or vLLM's.",
    ),
    click.option(
        "--block-size", type=click.IntRange(1), show_default="the namespace's", help="vLLM's hash block size."
    ),
    click.option(
        "--hash-algo",
        default="sha256_cbor",
        show_default=True,
        help="vLLM's --prefix-caching-hash-algo; must be a cbor one.",
    ),
    click.option("--hash-seed", show_default="not set", help="PYTHONHASHSEED of vLLM."),
)


def prompt_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of a command that `read_prompt` and `hashing_of` take."""
    for option in reversed(_PROMPT_OPTIONS):
        command = option(command)
    return command


def read_prompt(options: Mapping[str, Any]) -> Prompt | bytes:
    """A prompt, or the keys of its full blocks, 16 bytes each.

    Raises:
        click.UsageError: neither or both are given, they are malformed, or an option would be without effect.
    """
    from kvcached.cli.prompt_keys import Prompt

    tokens, keys = options["tokens"], options["keys"]
    if (tokens is None) == (keys is None):
        raise click.UsageError("give either --tokens or --keys: a file, or - for stdin")
    if tokens is not None:
        return Prompt(_read_tokens(tokens), salt=options["salt"], lora=options["lora"])
    if options["salt"] or options["lora"]:
        raise click.UsageError("--salt and --lora need --tokens: given keys already contain salt and adapter")
    return _read_keys(keys)


def hashing_of(options: Mapping[str, Any]) -> VllmHashing | None:
    """How vLLM hashes, with block size 0 for that of the namespace; None for keys of this project's client."""
    from kvcached_client.vllm.keys import VllmHashing

    if options["engine"] != "vllm":
        return None
    return VllmHashing(options["block_size"] or 0, options["hash_algo"], options["hash_seed"])


def _read_tokens(file: TextIO) -> list[int]:
    try:
        text = file.read()
        listed = json.loads(text) if text.lstrip().startswith("[") else [int(each) for each in text.split()]
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"--tokens: {error}: give token ids, as a JSON list or separated by spaces") from None
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in listed):
        raise click.UsageError(
            "--tokens: the list contains something other than integers: give the token ids of one prompt"
        )
    return list(listed)


def _read_keys(file: TextIO) -> bytes:
    try:
        lines = file.read().split()
    except ValueError as error:
        raise click.UsageError(f"--keys: {error}: give keys as hex digits, one per line") from None
    keys: list[bytes] = []
    for number, line in enumerate(lines, 1):
        if len(line) not in _KEY_DIGITS or not set(line) <= set(hexdigits):
            raise click.UsageError(
                f"--keys: {line!r}, key number {number}, is not a key: give 32 hex digits, or the 64 of a longer hash"
            )
        keys.append(bytes.fromhex(line)[:16])
    return b"".join(keys)
