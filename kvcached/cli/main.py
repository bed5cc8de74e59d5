"""The command ``kvcached``. Data goes to stdout, everything else to stderr. `docs/cli.md` is the same in words.

Commands import what they need when they run, so that the quick ones stay quick.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from string import hexdigits
from typing import Final

import click
from click.core import ParameterSource

from kvcached import VERSION, is_core_compiled
from kvcached.cli.control import (
    clear,
    drain,
    forget,
    pause,
    pin,
    resume,
    set_log_level,
    set_policy,
    set_weights,
    sleep,
    storage,
    unpin,
    wake,
)
from kvcached.cli.events import events
from kvcached.cli.explain import explain
from kvcached.cli.options import (
    EPILOG,
    INTERVAL_S,
    ExitCode,
    Remote,
    ask,
    deadline_option,
    fail,
    fields_of,
    json_option,
    owner_of,
    print_json,
    remote_options,
    run_dir_option,
)
from kvcached.cli.serve import capacity, check_config, keep, serve, supervise
from kvcached.cli.set_up import doctor, init, keys
from kvcached.cli.top import top, watch
from kvcached.cli.what_if import what_if
from kvcached.log import escaped

__all__ = ["ExitCode", "main"]

_KEY_DIGITS: Final = 32
#: The directory that holds the `kvcached` package, and in a checkout `examples` beside it.
_CHECKOUT: Final = Path(__file__).resolve().parents[2]

#: Headings in order; under each its commands, with what fits a line of 80 columns.
SECTIONS: Final = {
    "Set up": {
        "init": "Write a configuration and a systemd unit.",
        "check-config": "Check a configuration against this machine.",
        "capacity": "Print how many blocks and tokens a configuration holds.",
        "keys": "Make a key for other machines, or show its public key.",
        "doctor": "Check an engine's environment and its arguments.",
        "demo": "In a checkout: kill an engine, reuse its cached blocks.",
    },
    "Run": {
        "serve": "Run the daemon until SIGTERM or SIGINT.",
        "supervise": "Run `serve`, restart it after a crash, keep its memory.",
        "keep": "Keep a daemon's memory while its container is replaced.",
    },
    "Look": {
        "health": "Send a real request through every worker.",
        "describe": "Print replicas, layouts, limits, versions.",
        "stats": "Print counters and gauges.",
        "top": "Show hits, occupancy and copies, again and again.",
        "tree": "Show the index: runs of blocks and their copies.",
        "inspect": "Show where one block is, and which requests hold it.",
        "explain": "Say why a prompt missed.",
        "what-if": "Estimate the hits of a larger or smaller host pool.",
        "events": "Follow what the daemon tells routers.",
        "check": "Run the invariant checker on the live daemon.",
        "version": "Print the version.",
    },
    "Operate": {
        "pin": "Keep the cached blocks of a prompt for a time.",
        "unpin": "End a pin.",
        "forget": "Remove a prompt and what continues it from the cache.",
        "clear": "Forget all cached blocks of a replica or namespace.",
        "set-weights": "Set the version of the weights, and clear.",
        "set-policy": "Change when blocks are copied to host memory.",
        "set-log-level": "Change what the daemon logs; debug tells of each request.",
        "storage": "Show, attach, detach or clear storage.",
        "pause": "Stop starting copies between device and host memory.",
        "drain": "Stop admitting sessions and leases.",
        "resume": "End a pause or a drain.",
        "sleep": "Give the memory of a device pool back for a while.",
        "wake": "Make the memory of a device pool again.",
    },
}


#: Commands that do not ask a daemon by its RPC socket.
_HERE_ONLY: Final = frozenset({*SECTIONS["Set up"], *SECTIONS["Run"], "events", "version"})


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


class GroupedCommands(click.Group):
    """A group whose help lists its commands under `SECTIONS`."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's
        """Write the sections."""
        for heading, commands in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl(list(commands.items()))


@click.group(
    cls=GroupedCommands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EPILOG,
    no_args_is_help=True,
)
@click.version_option(VERSION, message="%(version)s")
@remote_options
@click.pass_context
def main(context: click.Context, endpoint: str | None, server_key: str, key_file: Path | None) -> None:
    """The KV-cache daemon for the LLM inference engines of one node."""
    is_option = context.get_parameter_source("endpoint") is ParameterSource.COMMANDLINE
    is_here = context.invoked_subcommand in _HERE_ONLY
    if endpoint is None or (is_here and not is_option):  # the variable is for the other commands
        return
    if not endpoint.startswith("tcp://"):
        name = "--endpoint" if is_option else "KVCACHED_ENDPOINT"
        raise click.UsageError(f"{name} {endpoint!r} is none: give tcp://HOST:PORT")
    if is_here:
        raise click.UsageError(f"{context.invoked_subcommand} asks no daemon on another machine: omit --endpoint")
    context.obj = Remote(endpoint, server_key, key_file)


for _command in (
    *(init, check_config, capacity, keys, doctor, serve, supervise, keep, top, explain, what_if, events, pin, unpin),
    *(forget, clear, set_weights, set_policy, set_log_level, storage, pause, drain, resume, sleep, wake),
):
    main.add_command(_command)


@main.command(epilog=EPILOG)
@run_dir_option
@deadline_option
@json_option
def health(run_dir: Path | None, deadline_ms: int, *, as_json: bool) -> None:
    """Ask the daemon to send a real request through every worker. Exit code 1 if a part fails."""
    report = ask(run_dir, deadline_ms, lambda admin: admin.health())
    if as_json:
        print_json(fields_of(report))
    elif owner := owner_of(run_dir):
        click.echo(f"the daemon runs as {owner}")
    for part in () if as_json else report.parts:
        told = escaped(f"{part.part}{f': {part.detail}' if part.detail else ''}")
        click.echo(f"{'ok  ' if part.ok else 'FAIL'}  {told}")
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
        click.echo("\n".join(map(escaped, report.violations)) or "no violations")
    sys.exit(ExitCode.OK if report.ok else ExitCode.UNHEALTHY)


@main.command(epilog=EPILOG)
@run_dir_option
@deadline_option
@click.option(
    "--watch",
    "interval_s",
    metavar="SECONDS",
    type=INTERVAL_S,
    show_default="once",
    help="Print hits, blocks and bytes of each so many seconds, a line each, until Ctrl-C.",
)
@json_option
def stats(run_dir: Path | None, deadline_ms: int, interval_s: float | None, *, as_json: bool) -> None:
    """Print gauges (the state of every slot) and counters since the daemon's start."""
    if interval_s is not None:
        watch(interval_s, run_dir, as_json=as_json)
        return
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
    if report.blocks:
        half, most = report.half_depth, report.nine_tenths_depth
        click.echo(f"depth: {report.deepest} blocks; half of the blocks within {half}, nine tenths within {most}")


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
@click.option("--tp", type=click.Choice([1, 2]), default=2, show_default=True, help="Shard processes of the engine.")
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where the engine computes."
)
@click.option("--cuda-graphs", is_flag=True, help="The engine replays its decode steps; with --device cuda.")
@json_option
def demo(*, tp: int, device: str, cuda_graphs: bool, as_json: bool) -> None:
    """Kill an engine, reuse its cached blocks, compare outputs. Needs a checkout and the extra `examples`."""
    if not (_CHECKOUT / "examples" / "demo").is_dir():
        fail(ExitCode.START_FAILED, "the demo is not part of the package; run it from a checkout: make demo")
    os.chdir(_CHECKOUT)
    if cuda_graphs and device != "cuda":
        raise click.UsageError("--cuda-graphs needs --device cuda")
    flags = [flag for flag, given in (("--cuda-graphs", cuda_graphs), ("--json", as_json)) if given]
    options = ["--tp", str(tp), "--device", device, *flags]
    os.execv(sys.executable, [sys.executable, "-m", "examples.demo", *options])  # noqa: S606 - no shell is wanted


@main.command(epilog=EPILOG)
@json_option
def version(*, as_json: bool) -> None:
    """Print the version; with --json also whether the core is compiled."""
    if as_json:
        print_json({"version": VERSION, "core_compiled": is_core_compiled()})
    else:
        click.echo(VERSION)
