"""The commands that change what a daemon does: pause, resume, drain, clear, set-weights, set-policy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import click

from kvcached.cli_common import EPILOG, ExitCode, ask, fields_of, json_option, print_json, run_dir_option
from kvcached_client.types import WritePolicy

#: For the daemon's answer, on top of what a command lets the daemon wait.
_ANSWER_MS = 5000

_replica_option = click.option("--replica", default="", show_default="all", help="This replica only.")
_replica_argument = click.argument("replica")


def _deadline_option(default: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(
        "--deadline-ms",
        type=click.IntRange(1, 600_000),
        default=default,
        show_default=True,
        help="Longest wait for what is under way, in milliseconds. Past it, what was asked for holds all the same.",
    )


@click.command(epilog=EPILOG)
@_replica_option
@run_dir_option
@_deadline_option(5000)
@json_option
def pause(replica: str, run_dir: Path | None, deadline_ms: int, *, as_json: bool) -> None:
    """Start no copies between device and host memory until `resume`. Exit code 1 if some are still under way."""
    paused = ask(run_dir, _ANSWER_MS, lambda admin: admin.pause(replica, deadline_ms=deadline_ms))
    if as_json:
        print_json(fields_of(paused))
    else:
        held = "paused" if paused.holds else "resumed by somebody else meanwhile"
        click.echo(f"{held}; copies under way: {paused.under_way}")
    sys.exit(ExitCode.OK if paused.holds and not paused.under_way else ExitCode.UNHEALTHY)


@click.command(epilog=EPILOG)
@_replica_option
@run_dir_option
@json_option
def resume(replica: str, run_dir: Path | None, *, as_json: bool) -> None:
    """End a pause, and, without --replica, a drain."""
    resumed = ask(run_dir, _ANSWER_MS, lambda admin: admin.resume(replica))
    if as_json:
        print_json(fields_of(resumed))
    else:
        click.echo(f"resumed; the daemon is {resumed.state}")


@click.command(epilog=EPILOG)
@run_dir_option
@_deadline_option(5000)
@json_option
def drain(run_dir: Path | None, deadline_ms: int, *, as_json: bool) -> None:
    """Admit no new sessions and leases until `resume`. Exit code 1 if something is still held or under way."""
    drained = ask(run_dir, _ANSWER_MS, lambda admin: admin.drain(deadline_ms=deadline_ms))
    left = (drained.leases, drained.copies, drained.requests)
    if as_json:
        print_json(fields_of(drained))
    else:
        held = "draining" if drained.holds else "resumed by somebody else meanwhile"
        click.echo(f"{held}; left: {left[0]} leases, {left[1]} copies, {left[2]} requests that wait")
    sys.exit(ExitCode.OK if drained.holds and not any(left) else ExitCode.UNHEALTHY)


@click.command(epilog=EPILOG)
@_replica_argument
@run_dir_option
@_deadline_option(60_000)
@json_option
def clear(replica: str, run_dir: Path | None, deadline_ms: int, *, as_json: bool) -> None:
    """Forget what REPLICA and those that share its blocks have cached. Their engines have to connect anew."""
    cleared = ask(run_dir, _ANSWER_MS, lambda admin: admin.clear(replica, deadline_ms=deadline_ms))
    if as_json:
        print_json(fields_of(cleared))
    else:
        click.echo(f"{cleared.blocks} blocks of {', '.join(cleared.replicas)}; generation {cleared.generation}")


@click.command(epilog=EPILOG)
@_replica_argument
@click.argument("version")
@run_dir_option
@_deadline_option(60_000)
@json_option
def set_weights(replica: str, version: str, run_dir: Path | None, deadline_ms: int, *, as_json: bool) -> None:
    """As `clear`: from now on the weights of REPLICA are VERSION. Does nothing where they are already."""
    done = ask(run_dir, _ANSWER_MS, lambda admin: admin.set_weights(replica, version, deadline_ms=deadline_ms))
    if as_json:
        print_json(fields_of(done))
    else:
        names = ", ".join(done.replicas)
        click.echo(f"weights {done.weights_version} of {names}; {done.blocks} blocks; generation {done.generation}")


@click.command(epilog=EPILOG)
@click.argument("target", metavar="REPLICA-OR-NAMESPACE")
@click.argument("policy", type=click.Choice([policy.value for policy in WritePolicy]))
@run_dir_option
@json_option
def set_policy(target: str, policy: str, run_dir: Path | None, *, as_json: bool) -> None:
    """Copy blocks to host memory by another write policy from now on. Does nothing where it is that already."""
    done = ask(run_dir, _ANSWER_MS, lambda admin: admin.set_policy(target, WritePolicy(policy)))
    if as_json:
        print_json(fields_of(done))
    else:
        name = ", ".join(done.replicas) or done.label
        click.echo(f"write policy of {name} ({done.namespace}): {done.policy}, was {done.before}")


COMMANDS = (pause, resume, drain, clear, set_weights, set_policy)
