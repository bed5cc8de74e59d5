"""What commands print for people: names and values, a line each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import click

from kvcached.capacity import Capacity
from kvcached_client.protocol import Description, InspectReport, StatsReport


def print_stats(report: StatsReport) -> None:
    """Where every slot is, and what happened since the start."""
    _print_facts(
        "",
        {
            "state": report.state + (", attached engines paused" if report.attached_paused else ""),
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
                "degraded": "YES" if pool.degraded else "no",
                "restarts": pool.restarts,
                "paused": "YES" if pool.paused else "no",
                "session": pool.session or "none",
                "leases": pool.leases,
                "epoch": pool.epoch,
                "slots": pool.slots,
                **pool.states,
                "evictable": pool.evictable,
                "pinned": pool.pinned,
            },
        )
    for host in report.hosts:
        _print_facts(
            f"host pool of {', '.join(host.replicas) or host.label or 'a cleared namespace'}",
            {
                "namespace": host.namespace,
                **({} if host.replicas else {"generation": host.generation}),
                **({} if host.replicas else {"engines": host.sessions, "leases": host.leases}),
                "write policy": host.write_policy,
                "pinned": host.pinned,
                "slabs": host.slabs,
                "slots": host.slots,
                **host.states,
            },
        )
    if report.hosts:
        _print_facts("transfers", {name.replace("_", " "): count for name, count in report.transfers.items()})
    _print_facts("counters", dict(sorted(report.counters.items())))


def print_description(report: Description) -> None:
    """What a daemon serves."""
    _print_facts(
        "",
        {
            "version": report.version,
            "protocol": f"{report.protocol_min} to {report.protocol_max}",
            "state": report.state,
            "pid": report.pid,
            "daemon epoch": report.daemon_epoch,
        },
    )
    for replica in report.replicas:
        _print_facts(
            f"replica {replica.name}",
            {
                "model": replica.model,
                "weights": replica.weights_version or "as configured",
                "generation": replica.generation,
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


def print_block(report: InspectReport) -> None:
    """Where a block is and who holds it."""
    if not report.found:
        click.echo("no copy of this block is in the index")
        return
    run_end = report.run_start + report.run_blocks
    _print_facts(
        "",
        {
            "namespace": report.namespace,
            "block": f"{report.depth} of its chain, in the run [{report.run_start}, {run_end})",
            "block before": report.parent.hex() or "none",
            "runs behind": report.children,
            **{f"copy in {place.tier}": f"slot {place.slot}, {place.state}" for place in report.places},
        },
    )
    for title, lines in (("held by the requests", report.leases), ("copied by", report.transfers)):
        if lines:
            click.echo(f"\n{title}")
        for line in lines:
            click.echo(f"  {line}")


def print_capacity(room: Capacity) -> None:
    """What a configuration has room for."""
    totals = asdict(room)
    del totals["replicas"]
    _print_facts("", {name.replace("_", " "): value for name, value in totals.items()})
    for replica in room.replicas:
        facts = asdict(replica)
        _print_facts(
            f"replica {facts.pop('replica')}", {name.replace("_", " "): value for name, value in facts.items()}
        )


def _print_facts(title: str, facts: Mapping[str, object]) -> None:
    """Lines of `name: value` under a title ("" = none). Nothing is cut, however narrow the terminal is."""
    if title:
        click.echo(f"\n{title}")
    width = max((len(name) for name in facts), default=0) + 2
    for name, value in facts.items():
        click.echo(f"{'  ' if title else ''}{f'{name}:':<{width}}{value}")
