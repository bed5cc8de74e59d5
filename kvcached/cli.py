"""The command ``kvcached``. Data goes to stdout, everything else to stderr. `docs/cli.md` is the same in words.

Commands import what they need when they run, so that the quick ones stay quick.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from kvcached import VERSION

if TYPE_CHECKING:
    from kvcached.config import Config
    from kvcached_client import Admin
    from kvcached_client.protocol import Header

Reply = TypeVar("Reply", bound="Header")


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
    ExitCode.UNHEALTHY: "the daemon answered, and something is wrong: unhealthy, violations, differing outputs",
    ExitCode.USAGE: "wrong usage or configuration; nothing was started",
    ExitCode.START_FAILED: "the start failed; everything that was started has ended",
    ExitCode.UNREACHABLE: "no daemon answered in time",
    ExitCode.INTERRUPTED: "ended by Ctrl-C before it was done; a demo also by SIGTERM (143) or SIGHUP (129)",
}
_EPILOG = "\b\nExit codes:\n" + "\n".join(f"{code.value:>5}  {code.meaning}" for code in ExitCode)

_config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    envvar="KVCACHED_CONFIG",
    show_envvar=True,
    required=True,
    help="TOML file; see docs/configuration.md.",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.", show_default=True)
_run_dir_option = click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    envvar="KVCACHED_RUN_DIR",
    show_envvar=True,
    show_default="$RUNTIME_DIRECTORY, $XDG_RUNTIME_DIR/kvcached, /tmp/kvcached-<uid>",
    help="Folder of the daemon's sockets.",
)
_deadline_option = click.option(
    "--deadline-ms",
    type=click.IntRange(1, 600_000),
    default=5000,
    show_default=True,
    help="Longest wait for the answer, in milliseconds.",
)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_EPILOG,
    no_args_is_help=True,
)
@click.version_option(VERSION, message="%(version)s")
def main() -> None:
    """The KV-cache daemon for the LLM inference engines of one node."""


def _overlay_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options that overlay a key of the file each. The environment's overlay is the configuration's own business."""
    for name, choices in (
        ("log-format", click.Choice(["plain", "json"])),
        ("log-level", click.Choice(["debug", "info", "warning", "error"])),
        ("run-dir", None),
    ):
        variable = f"KVCACHED_{name.replace('-', '_').upper()}"
        text = f"Overrides {name.replace('-', '_')} of the file.  [env var: {variable}]"
        command = click.option(f"--{name}", type=choices, show_default="what the file says", help=text)(command)
    return command


@main.command(epilog=_EPILOG)
@_config_option
@_overlay_options
def serve(config_path: Path, **options: str | None) -> None:
    """Run the daemon until SIGTERM or SIGINT. Logs go to stderr."""
    config = _load(config_path, options)
    from kvcached.log import set_up_logging

    set_up_logging(config.log_level, config.log_format)
    daemon = importlib.import_module("kvcached.daemon")
    try:
        code = daemon.run(config)
    except daemon.StartError as error:
        _fail(ExitCode.START_FAILED, str(error))
    sys.exit(code)


@main.command(epilog=_EPILOG)
@_config_option
@_overlay_options
@_json_option
def check_config(config_path: Path, *, as_json: bool, **options: str | None) -> None:
    """Check a configuration; print it with every default, and what it comes to. Starts nothing."""
    from kvcached.config_report import as_toml, effective, figures_of

    config = _load(config_path, options)
    figures = [asdict(figures) for figures in figures_of(config)]
    if as_json:
        _print_json({"config": effective(config), "figures": figures})
        return
    click.echo(as_toml(config))
    for replica in figures:
        click.echo(f"# {', '.join(f'{name} {value}' for name, value in replica.items())}")


@main.command(epilog=_EPILOG)
@_run_dir_option
@_deadline_option
@_json_option
def health(run_dir: Path | None, deadline_ms: int, *, as_json: bool) -> None:
    """Ask the daemon to try a real request through every worker. Exit code 1 if a part fails."""
    report = _ask(run_dir, deadline_ms, lambda admin: admin.health())
    if as_json:
        _print_reply(report)
    for part in () if as_json else report.parts:
        click.echo(f"{'ok  ' if part.ok else 'FAIL'}  {part.part}{f': {part.detail}' if part.detail else ''}")
    sys.exit(ExitCode.OK if report.ok else ExitCode.UNHEALTHY)


@main.command(epilog=_EPILOG)
@_run_dir_option
@_deadline_option
@_json_option
def check(run_dir: Path | None, deadline_ms: int, *, as_json: bool) -> None:
    """Run the invariant checker on the live daemon. Exit code 1 if an invariant is broken."""
    report = _ask(run_dir, deadline_ms, lambda admin: admin.check())
    if as_json:
        _print_reply(report)
    else:
        click.echo("\n".join(report.violations) or "no violations")
    sys.exit(ExitCode.OK if report.ok else ExitCode.UNHEALTHY)


@main.command(epilog=_EPILOG)
@_run_dir_option
@_deadline_option
@_json_option
def stats(run_dir: Path | None, deadline_ms: int, *, as_json: bool) -> None:
    """Print counters and gauges: where every slot is, and what happened since the start."""
    report = _ask(run_dir, deadline_ms, lambda admin: admin.stats())
    if as_json:
        _print_reply(report)
        return
    _print_facts(
        "",
        {
            "up": f"{report.uptime_ms / 1000:.0f} s",
            "sessions": report.sessions,
            "cached blocks": report.cached_blocks,
            "runs": report.runs,
        },
    )
    for pool in report.pools:
        _print_facts(
            f"replica {pool.replica}",
            {
                "healthy": "yes" if pool.healthy else "NO",
                "session": pool.session or "none",
                "leases": pool.leases,
                "epoch": pool.epoch,
                "slots": pool.slots,
                **pool.states,
                "evictable": pool.evictable,
            },
        )
    _print_facts("counters", dict(sorted(report.counters.items())))


@main.command(epilog=_EPILOG)
@_run_dir_option
@_deadline_option
@_json_option
def describe(run_dir: Path | None, deadline_ms: int, *, as_json: bool) -> None:
    """Print what the daemon serves: replicas, layouts, limits, versions."""
    report = _ask(run_dir, deadline_ms, lambda admin: admin.describe())
    if as_json:
        _print_reply(report)
        return
    _print_facts(
        "",
        {
            "version": report.version,
            "protocol": f"{report.protocol_min} to {report.protocol_max}",
            "pid": report.pid,
            "daemon epoch": report.daemon_epoch,
        },
    )
    for replica in report.replicas:
        _print_facts(
            f"replica {replica.name}",
            {
                "model": replica.model,
                "device": replica.device,
                "shards": replica.layout.shards,
                "slots": replica.slots,
                "block size": f"{replica.layout.block_size} tokens",
                "bytes per block": replica.bytes_per_block,
                "keys": replica.key_algorithm,
                "layout": replica.fingerprint,
            },
        )
    _print_facts("limits", dict(sorted(report.limits.items())))


@main.command(epilog=_EPILOG)
@click.option("--tp", type=click.Choice([1, 2]), default=2, show_default=True, help="Shard processes of the engine.")
@_json_option
def demo(*, tp: int, as_json: bool) -> None:
    """Kill an engine, start it again, and compare its outputs. Needs a checkout and the extra `examples`."""
    from kvcached.demo import run_demo

    sys.exit(run_demo(json_output=as_json, tp=tp))


@main.command(epilog=_EPILOG)
@_json_option
def version(*, as_json: bool) -> None:
    """Print the version."""
    if as_json:
        _print_json({"version": VERSION})
    else:
        click.echo(VERSION)


def _load(path: Path, options: dict[str, str | None]) -> Config:
    from kvcached.config import load_config
    from kvcached.config_error import ConfigError

    try:
        return load_config(path, options={key: value for key, value in options.items() if value is not None})
    except ConfigError as error:
        _fail(ExitCode.USAGE, str(error))


def _ask(run_dir: Path | None, deadline_ms: int, question: Callable[[Admin], Reply]) -> Reply:
    """The daemon's answer; whatever goes wrong ends the program."""
    from kvcached_client import Admin, BadRequest, RequestError, TransportError

    try:
        with Admin.connect(run_dir, deadline_ms=deadline_ms) as admin:
            return question(admin)
    except BadRequest as error:
        _fail(ExitCode.USAGE, str(error))
    except RequestError as error:
        _fail(ExitCode.UNHEALTHY, str(error))
    except TransportError as error:
        _fail(ExitCode.UNREACHABLE, f"{error} (start it with: kvcached serve --config FILE)")


def _fail(code: ExitCode, message: str) -> NoReturn:
    for line in message.splitlines():
        click.echo(f"kvcached: {line}", err=True)
    sys.exit(code)


def _print_json(value: object) -> None:
    click.echo(json.dumps(value))


def _print_reply(reply: Header) -> None:
    """A reply as JSON, without what belongs to its transport."""
    import msgspec

    fields: dict[str, Any] = msgspec.to_builtins(reply)
    _print_json({name: value for name, value in fields.items() if name not in {"op", "id"}})


def _print_facts(title: str, facts: Mapping[str, object]) -> None:
    """Lines of `name: value` under a title ("" = none). Nothing is cut, however narrow the terminal is."""
    if title:
        click.echo(f"\n{title}")
    width = max((len(name) for name in facts), default=0) + 2
    for name, value in facts.items():
        click.echo(f"{'  ' if title else ''}{f'{name}:':<{width}}{value}")
