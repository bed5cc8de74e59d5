"""The commands that change what a daemon does and keeps: pause, drain, clear, set-*, sleep, storage, pin, forget."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import click

from kvcached.cli.options import (
    EPILOG,
    ExitCode,
    ask,
    deadline_option,
    fields_of,
    hashing_of,
    json_option,
    print_json,
    prompt_options,
    read_prompt,
    run_dir_option,
)
from kvcached.log import escaped
from kvcached_client.protocol.admin import (
    ADMIN_DEADLINE_MS_MAX,
    PIN_TTL_MS_MAX,
    LocalDisk,
    StorageAction,
    StorageReport,
)
from kvcached_client.types import KEY_SIZE_BYTES, LogLevel, WritePolicy

if TYPE_CHECKING:
    from kvcached.cli.prompt_keys import Prompt
    from kvcached_client import Admin
    from kvcached_client.protocol.engine import Pinned, PrefixForgotten
    from kvcached_client.vllm.keys import VllmHashing

#: For the daemon's answer, on top of what a command lets the daemon wait.
_ANSWER_MS: Final = 5000
#: Bytes of a namespace's root that tell it from others.
_SHOWN_BYTES: Final = 8
_MS_PER_S: Final = 1000
_MIB: Final = 1 << 20
#: What a deadline limits, where a command is about work under way.
_HELD: Final = "Longest wait for copies and requests in flight, in milliseconds. The command holds even on a timeout."

_replica_option = click.option("--replica", default="", show_default="all", help="Only this replica.")
_target_argument = click.argument("target", metavar="REPLICA-OR-NAMESPACE")


def _deadline_option(
    default: int, meaning: str = _HELD, *, least: int = 1
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(
        "--deadline-ms",
        type=click.IntRange(least, ADMIN_DEADLINE_MS_MAX),
        default=default,
        show_default=True,
        help=meaning,
    )


@click.command(epilog=EPILOG)
@_replica_option
@run_dir_option
@_deadline_option(5000)
@json_option
def pause(replica: str, run_dir: Path | None, deadline_ms: int, *, as_json: bool) -> None:
    """Start no copies between device and host memory until `resume`. Exit code 1 if copies are still in flight."""
    paused = ask(run_dir, _ANSWER_MS, lambda admin: admin.pause(replica, deadline_ms=deadline_ms))
    if as_json:
        print_json(fields_of(paused))
    else:
        held = "paused" if paused.holds else "resumed meanwhile by another command"
        click.echo(f"{held}; copies in flight: {paused.under_way}")
    sys.exit(ExitCode.OK if paused.holds and not paused.under_way else ExitCode.UNHEALTHY)


@click.command(epilog=EPILOG)
@_replica_option
@run_dir_option
@json_option
def resume(replica: str, run_dir: Path | None, *, as_json: bool) -> None:
    """End a pause. Without --replica, also end a drain."""
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
    """Admit no new sessions and leases until `resume`. Exit code 1 if leases, copies or waiting requests are left."""
    drained = ask(run_dir, _ANSWER_MS, lambda admin: admin.drain(deadline_ms=deadline_ms))
    left = (drained.leases, drained.copies, drained.requests)
    if as_json:
        print_json(fields_of(drained))
    else:
        held = "draining" if drained.holds else "resumed meanwhile by another command"
        click.echo(f"{held}; left: {left[0]} leases, {left[1]} copies, {left[2]} waiting requests")
    sys.exit(ExitCode.OK if drained.holds and not any(left) else ExitCode.UNHEALTHY)


@click.command(epilog=EPILOG)
@_target_argument
@run_dir_option
@_deadline_option(60_000)
@json_option
def clear(target: str, run_dir: Path | None, deadline_ms: int, *, as_json: bool) -> None:
    """Forget all cached blocks of a replica and the replicas that share them, or of a namespace; also in storage."""
    cleared = ask(run_dir, _ANSWER_MS, lambda admin: admin.clear(target, deadline_ms=deadline_ms))
    if as_json:
        print_json(fields_of(cleared))
    else:
        name = ", ".join(cleared.replicas) or f"{escaped(cleared.label)} ({cleared.namespace[:_SHOWN_BYTES].hex()})"
        click.echo(f"{cleared.blocks} blocks of {name}; generation {cleared.generation}")


@click.command(epilog=EPILOG)
@_target_argument
@click.argument("version")
@run_dir_option
@_deadline_option(60_000)
@json_option
def set_weights(target: str, version: str, run_dir: Path | None, deadline_ms: int, *, as_json: bool) -> None:
    """Set the weights of a replica to VERSION, and clear it. Does nothing if it has that version already."""
    done = ask(run_dir, _ANSWER_MS, lambda admin: admin.set_weights(target, version, deadline_ms=deadline_ms))
    if as_json:
        print_json(fields_of(done))
    else:
        names = ", ".join(done.replicas)
        click.echo(
            f"weights {escaped(done.weights_version)} of {names}; {done.blocks} blocks; generation {done.generation}"
        )


@click.command(epilog=EPILOG)
@_target_argument
@click.argument("policy", type=click.Choice([policy.value for policy in WritePolicy]))
@run_dir_option
@json_option
def set_policy(target: str, policy: str, run_dir: Path | None, *, as_json: bool) -> None:
    """Change when blocks are copied to host memory. Does nothing if the write policy is set already."""
    done = ask(run_dir, _ANSWER_MS, lambda admin: admin.set_policy(target, WritePolicy(policy)))
    if as_json:
        print_json(fields_of(done))
    else:
        name = ", ".join(done.replicas) or escaped(done.label)
        click.echo(f"write policy of {name} ({done.namespace}): {done.policy}, was {done.before}")


@click.command(epilog=EPILOG)
@click.argument("level", type=click.Choice(get_args(LogLevel)))
@run_dir_option
@json_option
def set_log_level(level: LogLevel, run_dir: Path | None, *, as_json: bool) -> None:
    """Log messages of LEVEL and above until the daemon's end; with debug, a line for each request of an engine."""
    done = ask(run_dir, _ANSWER_MS, lambda admin: admin.set_log_level(level))
    if as_json:
        print_json(fields_of(done))
    else:
        click.echo(f"log level: {done.level}, was {done.before}")


@click.command(epilog=EPILOG)
@_target_argument
@run_dir_option
@_deadline_option(
    30_000,
    "Longest time to store blocks that host memory does not have, in milliseconds. The others are dropped.",
    least=0,
)
@json_option
def sleep(target: str, run_dir: Path | None, deadline_ms: int, *, as_json: bool) -> None:
    """Give the memory of a device pool back until `wake`. Refused while an engine has a session on it."""
    slept = ask(run_dir, _ANSWER_MS, lambda admin: admin.sleep(target, deadline_ms=deadline_ms))
    if as_json:
        print_json(fields_of(slept))
    else:
        click.echo(f"asleep: {', '.join(slept.replicas)}; of {slept.blocks} blocks {slept.dropped} are dropped")


@click.command(epilog=EPILOG)
@_target_argument
@run_dir_option
@_deadline_option(
    120_000, "Longest wait for the memory and the workers, in milliseconds. After it, the wake continues."
)
@json_option
def wake(target: str, run_dir: Path | None, deadline_ms: int, *, as_json: bool) -> None:
    """Make the memory of a device pool again after `sleep`. Does nothing if the pool is awake."""
    woken = ask(run_dir, _ANSWER_MS, lambda admin: admin.wake(target, deadline_ms=deadline_ms))
    if as_json:
        print_json(fields_of(woken))
    else:
        click.echo(f"awake: {', '.join(woken.replicas)}")


@click.command(epilog=EPILOG)
@click.argument("action", type=click.Choice(["status", "attach", "detach", "clear"]), default="status")
@run_dir_option
@_deadline_option(60_000, "Longest wait for the answer, in milliseconds.")
@json_option
def storage(action: StorageAction, run_dir: Path | None, deadline_ms: int, *, as_json: bool) -> None:
    """Show the state of storage, or attach, detach or clear it. Exit code 1 if storage does not work."""
    report = ask(run_dir, deadline_ms, lambda admin: admin.storage(action))
    if as_json:
        print_json(fields_of(report))
    else:
        click.echo(_text(report))
    is_well = not report.backend or report.state in {"ready", "detached", "starting"}
    sys.exit(ExitCode.OK if is_well else ExitCode.UNHEALTHY)


def _text(report: StorageReport) -> str:
    if not report.backend:
        return "no storage is configured: add [storage], see docs/storage.md"
    lines = [f"{report.backend}: {report.state}; backup: {report.backup}"]
    if filled := _filled(report):
        lines.append(filled)
    if disk := report.local_disk:
        lines.append(
            f"local disk: {_filled(disk)}; {disk.read_blocks} blocks read from it and not from {report.backend}"
        )
    if report.record_age_ms >= 0:
        lines.append(
            f"shared with other machines: what they clear was last followed {report.record_age_ms // 1000} s ago"
        )
    if report.counters:
        lines.append(", ".join(f"{name} {count}" for name, count in sorted(report.counters.items())))
    if report.state == "read_only":
        lines.append(f"storage accepts no blocks: {escaped(report.why)}")
    elif report.why:
        lines.append(f"last failure: {escaped(report.why)} (its process was restarted {report.restarts} times)")
    return "\n".join(lines)


def _filled(report: StorageReport | LocalDisk) -> str:
    """How full storage is, as far as the backend says so; -1 is a figure that is not known."""
    size, capacity = report.size_bytes // _MIB, report.capacity_bytes // _MIB
    told = [f"{report.blocks} blocks"] if report.blocks >= 0 else []
    if report.size_bytes >= 0:
        told.append(f"{size} of {capacity} MiB" if report.capacity_bytes >= 0 else f"{size} MiB")
    elif report.capacity_bytes >= 0:
        told.append(f"{capacity} MiB at most")
    return ", ".join(told)


@click.command(epilog=EPILOG)
@_target_argument
@prompt_options
@click.option(
    "--ttl-s",
    type=click.IntRange(1, PIN_TTL_MS_MAX // _MS_PER_S),
    default=3600,
    show_default=True,
    help="How long to keep the blocks, in seconds.",
)
@run_dir_option
@deadline_option
@json_option
def pin(
    target: str,
    ttl_s: int,
    run_dir: Path | None,
    deadline_ms: int,
    *,
    as_json: bool,
    **options: Any,  # noqa: ANN401 - click's
) -> None:
    """Keep the cached blocks of a prompt for a time, even if no request uses them. Keeps full blocks only."""
    prompt, hashing = read_prompt(options), hashing_of(options)

    def question(admin: Admin) -> tuple[int, Pinned]:
        keys = _keys(admin, target, prompt, hashing)
        return len(keys) // KEY_SIZE_BYTES, admin.pin(target, keys, ttl_ms=ttl_s * _MS_PER_S)

    blocks, pinned = ask(run_dir, deadline_ms, question)
    until = _in_seconds(ttl_s)
    if as_json:
        print_json({"blocks": blocks, **fields_of(pinned), "until": until})
        return
    click.echo(f"pinned until {until}, of {blocks} blocks: {pinned.device} on the device, {pinned.host} in host memory")
    if not (pinned.device or pinned.host):
        click.echo("no block of the prompt is cached: pin it again after an engine has computed it")


@click.command(epilog=EPILOG)
@_target_argument
@prompt_options
@run_dir_option
@deadline_option
@json_option
def unpin(
    target: str,
    run_dir: Path | None,
    deadline_ms: int,
    *,
    as_json: bool,
    **options: Any,  # noqa: ANN401 - as above
) -> None:
    """End the pin with the same target and the same prompt. Does nothing if there is none."""
    prompt, hashing = read_prompt(options), hashing_of(options)
    was_pinned = ask(run_dir, deadline_ms, lambda admin: admin.unpin(target, _keys(admin, target, prompt, hashing)))
    if as_json:
        print_json({"was_pinned": was_pinned})
    else:
        click.echo("the prompt is no longer pinned" if was_pinned else "the prompt was not pinned")


@click.command(epilog=EPILOG)
@_target_argument
@prompt_options
@click.option(
    "--from-block",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Keep so many leading blocks of the prompt, with what else continues them.",
)
@run_dir_option
@_deadline_option(60_000, "Longest wait for storage, in milliseconds. The deletion there continues after it.")
@json_option
def forget(
    target: str,
    from_block: int,
    run_dir: Path | None,
    deadline_ms: int,
    *,
    as_json: bool,
    **options: Any,  # noqa: ANN401 - as above
) -> None:
    """Remove a prompt's cached blocks and all that continue them, also in storage. Exit code 1 if some are left."""
    prompt, hashing = read_prompt(options), hashing_of(options)

    def question(admin: Admin) -> PrefixForgotten:
        keys = _keys(admin, target, prompt, hashing)
        return admin.forget(target, keys, from_block=from_block, deadline_ms=deadline_ms)

    forgotten = ask(run_dir, _ANSWER_MS, question)
    if as_json:
        print_json(fields_of(forgotten))
    else:
        click.echo(
            f"removed: {forgotten.device} copies on devices, {forgotten.host} in host memory,"
            f" {forgotten.stored} blocks in storage"
        )
        if forgotten.in_use:
            click.echo(f"{forgotten.in_use} blocks are in use: unpin them, or wait for their requests, and repeat this")
        if forgotten.left_in_storage:
            click.echo(f"storage may have some still: {forgotten.left_in_storage}")
    is_left = bool(forgotten.in_use or forgotten.left_in_storage)
    sys.exit(ExitCode.UNHEALTHY if is_left else ExitCode.OK)


def _keys(admin: Admin, target: str, prompt: Prompt | bytes, hashing: VllmHashing | None) -> bytes:
    from kvcached.cli.prompt_keys import keys_at

    return prompt if isinstance(prompt, bytes) else keys_at(admin, target, prompt, hashing)


def _in_seconds(seconds: int) -> str:
    """A moment from now, as the log writes it."""
    moment = datetime.now(tz=UTC) + timedelta(seconds=seconds)
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")
