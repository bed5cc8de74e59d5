"""The command ``kvcached what-if``: what a host pool of another size would hit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvcached.cli.options import EPILOG, ask, deadline_option, json_option, print_json, run_dir_option
from kvcached.log import escaped

if TYPE_CHECKING:
    from rich.table import Table

    from kvcached_client.protocol.engine import HostStats, StatsReport

_TOO_FEW: Final = "too few of its blocks were sampled for an estimate: ask again when engines have sent more requests"


@click.command(name="what-if", epilog=EPILOG)
@run_dir_option
@deadline_option
@json_option
def what_if(run_dir: Path | None, deadline_ms: int, *, as_json: bool) -> None:
    """Estimate which part of the latest prompts a host pool of another size would hit."""
    report = ask(run_dir, deadline_ms, lambda admin: admin.stats())
    if as_json:
        print_json(_as_json(report))
        return
    from rich.console import Console

    console = Console(highlight=False)
    if not report.host_pool_bytes:
        console.print("this daemon has no host pool: a \\[host] table in its configuration makes one")
    elif not report.hosts:
        console.print("no engine has used the host pool yet")
    for host in report.hosts:
        if host.hit_estimates:
            click.echo(f"{_title(host)}, {host.asked_blocks:,} blocks")
            console.print(_table(host, report.host_pool_bytes))
        else:
            click.echo(f"{_title(host)}: {_TOO_FEW}")


def _as_json(report: StatsReport) -> dict[str, object]:
    return {
        "host_pool_bytes": report.host_pool_bytes,
        "namespaces": [
            {
                "namespace": host.namespace,
                "name": host.label or ", ".join(host.replicas),
                "asked_blocks": host.asked_blocks,
                "estimates": [
                    {
                        "size_bytes": round(each.size_ratio * report.host_pool_bytes),
                        "hit_ratio": round(each.hit_ratio, 4),
                    }
                    for each in host.hit_estimates
                ],
            }
            for host in report.hosts
        ],
    }


def _title(host: HostStats) -> str:
    name = escaped(host.label) or ", ".join(host.replicas)
    return f"{host.namespace} ({name})" if name else host.namespace


def _table(host: HostStats, pool_bytes: int) -> Table:
    from pydantic import ByteSize
    from rich.table import Table

    table = Table(box=None)
    for heading in ("host pool", "hits", "difference"):
        table.add_column(heading, justify="right")
    now = next(each.hit_ratio for each in host.hit_estimates if each.size_ratio == 1)
    for each in host.hit_estimates:
        points = round(100 * (each.hit_ratio - now))
        difference = "its size now" if each.size_ratio == 1 else f"{points:+d} points"
        size = ByteSize(each.size_ratio * pool_bytes).human_readable(separator=" ")
        table.add_row(size, f"{each.hit_ratio:.0%}", difference)
    return table
