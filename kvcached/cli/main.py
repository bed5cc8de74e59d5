"""The command ``kvcached``. Data goes to stdout, everything else to stderr. `docs/cli.md` is the same in words.

Commands import what they need when they run, so that the quick ones stay quick.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from string import hexdigits
from typing import TYPE_CHECKING

import click

from kvcached import VERSION
from kvcached.cli import control
from kvcached.cli.control import storage
from kvcached.cli.doctor import doctor
from kvcached.cli.explain import explain
from kvcached.cli.help import GroupedCommands
from kvcached.cli.init import init
from kvcached.cli.options import (
    EPILOG,
    ExitCode,
    ask,
    deadline_option,
    fail,
    fields_of,
    json_option,
    print_json,
    run_dir_option,
)
from kvcached.cli.pin import pin, unpin
from kvcached.cli.supervise import supervise

if TYPE_CHECKING:
    from kvcached.config.schema import Config

__all__ = ["ExitCode", "main"]

_KEY_DIGITS = 32
_config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    envvar="KVCACHED_CONFIG",
    show_envvar=True,
    required=True,
    help="TOML file; see docs/configuration.md.",
)


class _KeyType(click.ParamType[bytes]):
    """A block's key, written as hex digits."""

    name = "key"

    def convert(self, value: str | bytes, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        """The key's bytes, or wrong usage."""
        if isinstance(value, bytes):
            return value
        if len(value) != _KEY_DIGITS or not set(value) <= set(hexdigits):
            self.fail(
                f"{value!r} is not a key: give {_KEY_DIGITS} hex digits, as `kvcached tree` prints them", param, ctx
            )
        return bytes.fromhex(value)


@click.group(
    cls=GroupedCommands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EPILOG,
    no_args_is_help=True,
)
@click.version_option(VERSION, message="%(version)s")
def main() -> None:
    """The KV-cache daemon for the LLM inference engines of one node."""


main.add_command(init)
main.add_command(explain)
main.add_command(doctor)
main.add_command(supervise)
main.add_command(storage)
main.add_command(pin)
main.add_command(unpin)
for each in control.COMMANDS:
    main.add_command(each)


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


@main.command(epilog=EPILOG)
@_config_option
@_overlay_options
def serve(config_path: Path, **options: str | None) -> None:
    """Run the daemon until SIGTERM or SIGINT. Logs go to stderr."""
    # There is nothing that it could reload, and the end of a terminal is no reason to drop a cache.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    from kvcached.config.machine import check_machine
    from kvcached.log import set_up_logging
    from kvcached.recovery.fd_store import is_anything_stored

    config = _load(config_path, options, lambda config: check_machine(config, is_restart=is_anything_stored()))
    set_up_logging(config.log_level, config.log_format)
    daemon = importlib.import_module("kvcached.daemon")
    try:
        code = daemon.run(config)
    except daemon.StartError as error:
        fail(ExitCode.START_FAILED, str(error))
    sys.exit(code)


@main.command(epilog=EPILOG)
@_config_option
@_overlay_options
@json_option
def check_config(config_path: Path, *, as_json: bool, **options: str | None) -> None:
    """Check a configuration against this machine, and print the effective settings. Starts nothing."""
    from kvcached.config.machine import check_machine
    from kvcached.config.report import as_toml, effective, figures_of

    config = _load(config_path, options, lambda config: check_machine(config, is_trial=True))
    figures = [asdict(figures) for figures in figures_of(config)]
    if as_json:
        print_json({"config": effective(config), "figures": figures})
        return
    click.echo(as_toml(config))
    for replica in figures:
        click.echo(f"# {', '.join(f'{name} {value}' for name, value in replica.items())}")


@main.command(epilog=EPILOG)
@run_dir_option
@deadline_option
@json_option
def health(run_dir: Path | None, deadline_ms: int, *, as_json: bool) -> None:
    """Ask the daemon to send a real request through every worker. Exit code 1 if a part fails."""
    report = ask(run_dir, deadline_ms, lambda admin: admin.health())
    if as_json:
        print_json(fields_of(report))
    for part in () if as_json else report.parts:
        click.echo(f"{'ok  ' if part.ok else 'FAIL'}  {part.part}{f': {part.detail}' if part.detail else ''}")
    sys.exit(ExitCode.OK if report.ok else ExitCode.UNHEALTHY)


@main.command(epilog=EPILOG)
@run_dir_option
@deadline_option
@json_option
def check(run_dir: Path | None, deadline_ms: int, *, as_json: bool) -> None:
    """Run the invariant checker on the live daemon. Exit code 1 if an invariant is broken."""
    report = ask(run_dir, deadline_ms, lambda admin: admin.check())
    if as_json:
        print_json(fields_of(report))
    else:
        click.echo("\n".join(report.violations) or "no violations")
    sys.exit(ExitCode.OK if report.ok else ExitCode.UNHEALTHY)


@main.command(epilog=EPILOG)
@run_dir_option
@deadline_option
@json_option
def stats(run_dir: Path | None, deadline_ms: int, *, as_json: bool) -> None:
    """Print gauges (the state of every slot) and counters since the daemon's start."""
    report = ask(run_dir, deadline_ms, lambda admin: admin.stats())
    if as_json:
        print_json(fields_of(report))
        return
    from kvcached.cli.output import print_stats

    print_stats(report, ask(run_dir, deadline_ms, lambda admin: admin.describe()).offload)


@main.command(epilog=EPILOG)
@run_dir_option
@deadline_option
@json_option
def describe(run_dir: Path | None, deadline_ms: int, *, as_json: bool) -> None:
    """Print what the daemon serves: replicas, layouts, limits, versions."""
    report = ask(run_dir, deadline_ms, lambda admin: admin.describe())
    if as_json:
        print_json(fields_of(report))
        return
    from kvcached.cli.output import print_description

    print_description(report)


@main.command(epilog=EPILOG)
@click.option("--replica", default="", show_default="all", help="Show the tree of this replica only.")
@click.option(
    "--levels",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    help="Levels of runs to show, from the root down.",
)
@click.option(
    "--children", type=click.IntRange(1, 256), default=8, show_default=True, help="Runs to show below each run."
)
@run_dir_option
@deadline_option
@json_option
def tree(replica: str, levels: int, children: int, run_dir: Path | None, deadline_ms: int, *, as_json: bool) -> None:
    """Show the index: runs of blocks, where their copies are, and which are in use."""
    report, nodes = ask(run_dir, deadline_ms, lambda admin: admin.tree(replica, levels=levels, children=children))
    if as_json:
        print_json({**fields_of(report), "nodes": [fields_of(node) for node in nodes]})
        return
    from kvcached.cli.output import print_tree

    print_tree(nodes)
    click.echo(f"{report.blocks} blocks in {report.runs} runs")


@main.command(epilog=EPILOG)
@click.argument("key", type=_KeyType())
@run_dir_option
@deadline_option
@json_option
def inspect(key: bytes, run_dir: Path | None, deadline_ms: int, *, as_json: bool) -> None:
    """Show where the block with KEY (32 hex digits) is, and which requests hold it."""
    report = ask(run_dir, deadline_ms, lambda admin: admin.inspect(key))
    if as_json:
        print_json(fields_of(report))
        return
    from kvcached.cli.output import print_block

    print_block(report)


@main.command(epilog=EPILOG)
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


@main.command(epilog=EPILOG)
@click.option("--tp", type=click.Choice([1, 2]), default=2, show_default=True, help="Shard processes of the engine.")
@json_option
def demo(*, tp: int, as_json: bool) -> None:
    """Kill an engine, reuse its cached blocks, compare outputs. Needs a checkout and the extra `examples`."""
    from kvcached.demo.run import run_demo

    sys.exit(run_demo(json_output=as_json, tp=tp))


@main.command(epilog=EPILOG)
@json_option
def version(*, as_json: bool) -> None:
    """Print the version."""
    if as_json:
        print_json({"version": VERSION})
    else:
        click.echo(VERSION)


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
