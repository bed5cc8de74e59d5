"""The commands that run the daemon or take its configuration: serve, supervise, keep, check-config, capacity.

They import what they need when they run, so that the quick ones stay quick.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from kvcached.cli.options import EPILOG, ExitCode, fail, json_option, print_json

if TYPE_CHECKING:
    from kvcached.config.schema import Config

_config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    envvar="KVCACHED_CONFIG",
    show_envvar=True,
    required=True,
    help="TOML file; see docs/configuration.md.",
)


def _overlay_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options that overlay a key of the file each. The environment's overlay is the configuration's own business."""
    for name, choices in (
        ("log-format", click.Choice(["plain", "json"])),
        ("log-level", click.Choice(["debug", "info", "warning", "error"])),
        ("run-dir", None),
    ):
        variable = f"KVCACHED_{name.replace('-', '_').upper()}"
        text = f"Overrides {name.replace('-', '_')} in the file.  [env var: {variable}]"
        command = click.option(f"--{name}", type=choices, show_default="as in the file", help=text)(command)
    return command


_log_format_option = click.option(
    "--log-format",
    type=click.Choice(["plain", "json"]),
    default="plain",
    envvar="KVCACHED_LOG_FORMAT",
    show_envvar=True,
    show_default=True,
    help="Format of this command's own log; if given to supervise, also passed to the daemon.",
)


class _SocketPath(click.Path):
    """The path of a socket. `Path` itself takes no name for the directory that somebody happens to be in."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """The path, or wrong usage."""
        if not str(value):
            self.fail("names no socket: give its path", param, ctx)
        return super().convert(value, param, ctx)


@click.command(epilog=EPILOG)
@_config_option
@_overlay_options
def serve(config_path: Path, **options: str | None) -> None:
    """Run the daemon until SIGTERM or SIGINT. Logs go to stderr."""
    # There is nothing that it could reload, and the end of a terminal is no reason to drop a cache.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    from kvcached.config.machine import check_machine
    from kvcached.log import set_up_logging
    from kvcached.recovery.fd_store import is_anything_stored
    from kvcached.start_errors import StartError, WrongSetup

    config = _load(config_path, options, lambda config: check_machine(config, is_restart=is_anything_stored()))
    set_up_logging(config.log_level, config.log_format)
    daemon = importlib.import_module("kvcached.daemon")
    try:
        code = daemon.run(config)
    except StartError as error:
        code = ExitCode.USAGE if isinstance(error, WrongSetup) else ExitCode.START_FAILED
        if config.log_format == "plain":
            fail(code, str(error))
        log = logging.getLogger(__name__)
        log.error("the start failed: %(reason)s", {"reason": str(error)})  # noqa: TRY400 - the reason is for the operator
    sys.exit(code)


@click.command(epilog=EPILOG)
@_config_option
@_overlay_options
@json_option
def check_config(config_path: Path, *, as_json: bool, **options: str | None) -> None:
    """Check a configuration against this machine, and print the effective settings. Starts nothing."""
    from kvcached.config.machine import check_machine, warnings_of
    from kvcached.config.report import as_toml, effective, figures_of
    from kvcached.recovery.supervise import RESTART_VARIABLE

    asked_for = os.environ.get(RESTART_VARIABLE, "")  # by `supervise`, which starts a daemon next
    # Supervisors of earlier versions say 1, which is no daemon of theirs.
    predecessor = int(asked_for) if asked_for.isdecimal() and asked_for != "1" else 0

    def check(config: Config) -> None:
        check_machine(config, is_trial=not asked_for, is_next=bool(asked_for), predecessor=predecessor)

    config = _load(config_path, options, check)
    for warning in warnings_of(config):
        click.echo(f"kvcached: warning: {warning}", err=True)
    figures = [asdict(figures) for figures in figures_of(config)]
    if as_json:
        print_json({"config": effective(config), "figures": figures})
        return
    click.echo(as_toml(config))
    for replica in figures:
        click.echo(f"# {', '.join(f'{name} {value}' for name, value in replica.items())}")


@click.command(
    epilog=EPILOG,
    context_settings={"ignore_unknown_options": True},
    options_metavar="[OPTIONS] [OPTIONS OF serve]",
)
@click.option(
    "--failed-starts-max",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Give up after the daemon has died this many times in a row before it was ready.",
)
@_log_format_option
@click.option(
    "--keeper",
    type=_SocketPath(path_type=Path),
    show_default="none",
    help="Socket of `kvcached keep`, which keeps the memory beyond the end of this process and its container.",
)
@click.argument("serve_arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def supervise(
    context: click.Context,
    failed_starts_max: int,
    log_format: Literal["plain", "json"],
    keeper: Path | None,
    serve_arguments: tuple[str, ...],
) -> None:
    """Run `kvcached serve` with these arguments, restart it when it dies, and keep its memory meanwhile."""
    from click.core import ParameterSource

    from kvcached.log import set_up_logging
    from kvcached.recovery.supervise import Policy, check_command, serve_command
    from kvcached.recovery.supervise import supervise as run

    set_up_logging("info", log_format)
    given = context.get_parameter_source("log_format") is ParameterSource.COMMANDLINE
    arguments = [*(["--log-format", log_format] if given else []), *serve_arguments]
    policy = Policy(failed_starts_max=failed_starts_max)
    try:
        status = run(serve_command(arguments), policy, str(keeper or ""), check_command(arguments))
    except OSError as error:
        fail(ExitCode.START_FAILED, error.strerror or str(error))
    sys.exit(status)


@click.command(epilog=EPILOG)
@click.option(
    "--socket",
    "socket_path",
    type=_SocketPath(path_type=Path),
    required=True,
    help="Where to listen: in a directory that this container and that of `kvcached supervise` share.",
)
@_log_format_option
def keep(socket_path: Path, log_format: Literal["plain", "json"]) -> None:
    """Keep the memory of a daemon whose container is replaced. `kvcached supervise --keeper` connects to it."""
    from kvcached.log import set_up_logging
    from kvcached.recovery.keeper import keep as run

    set_up_logging("info", log_format)
    try:
        status = run(str(socket_path))
    except OSError as error:
        fail(ExitCode.START_FAILED, f"keeper at {socket_path}: {error.strerror or error}")
    sys.exit(status)


@click.command(epilog=EPILOG)
@_config_option
@json_option
def capacity(config_path: Path, *, as_json: bool) -> None:
    """Print the capacity of a configuration in blocks, tokens and bytes. Starts nothing, needs no daemon."""
    from kvcached.cli.output import print_capacity
    from kvcached.config.report import capacity_of

    room = capacity_of(_load(config_path, {}))
    if as_json:
        print_json(asdict(room))
    else:
        print_capacity(room)


def _load(path: Path, options: dict[str, str | None], check: Callable[[Config], None] = lambda _: None) -> Config:
    """The configuration, if it is right and `check` finds nothing wrong with it; else the end of the program."""
    from kvcached.config.problems import ConfigError
    from kvcached.config.schema import load_config

    try:
        config = load_config(path, options={key: value for key, value in options.items() if value is not None})
        check(config)
    except ConfigError as error:
        fail(ExitCode.USAGE, str(error))
    return config
