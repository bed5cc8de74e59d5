"""`kvcached storage`: what the tier below the host pool does, and what people do with it."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from kvcached.cli_common import EPILOG, ExitCode, ask, fields_of, json_option, print_json, run_dir_option
from kvcached_client.protocol_storage import StorageAction, StorageReport

_MIB = 1 << 20


@click.command(epilog=EPILOG)
@click.argument("action", type=click.Choice(["status", "attach", "detach", "clear"]), default="status")
@run_dir_option
@click.option(
    "--deadline-ms",
    type=click.IntRange(1, 600_000),
    default=60_000,
    show_default=True,
    help="Longest wait for the answer, in milliseconds.",
)
@json_option
def storage(action: StorageAction, run_dir: Path | None, deadline_ms: int, *, as_json: bool) -> None:
    """Say what storage does, or attach, detach or clear it. Exit code 1 if there is one that does not work."""
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
    if report.blocks >= 0:
        size, capacity = report.size_bytes // _MIB, report.capacity_bytes // _MIB
        lines.append(f"{report.blocks} blocks, {size} of {capacity} MiB")
    if report.counters:
        lines.append(", ".join(f"{name} {count}" for name, count in sorted(report.counters.items())))
    if report.why:
        lines.append(f"last failure: {report.why} (its process was started again {report.restarts} times)")
    return "\n".join(lines)
