"""What commands print for people: names and values, a line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import click
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from kvcached.config.report import Capacity
from kvcached.log import escaped
from kvcached_client.protocol.engine import (
    Description,
    EnginePoolStats,
    HostRegistration,
    InspectReport,
    OffloadInfo,
    StatsReport,
    TenantStats,
    TreeNode,
)


def cached_blocks(report: StatsReport) -> str:
    """How many blocks can be found in device pools and in host memory; many are in both."""
    in_host = sum(host.states.get("cached", 0) for host in report.hosts)
    return f"{report.cached_blocks:,} on devices, {in_host:,} in host memory"


def print_stats(report: StatsReport, offered: OffloadInfo | None = None) -> None:
    """Where every slot is, and what happened since the start; of the host pool, how much is free."""
    _print_facts(
        "",
        {
            "state": report.state + (", copies of engines in offload mode paused" if report.offload_paused else ""),
            "up": f"{report.uptime_ms / 1000:.0f} s",
            "sessions": report.sessions,
            "cached blocks": cached_blocks(report),
            "runs": report.runs,
        },
    )
    for pool in report.pools:
        _print_facts(
            f"replica {pool.replica}",
            {
                **({} if pool.state == "awake" else {"state": pool.state.replace("_", " ").upper()}),
                "healthy": "yes" if pool.healthy else "NO",
                "degraded": "YES" if pool.degraded else "no",
                **({"trouble": pool.trouble} if pool.trouble else {}),
                "restarts": pool.restarts,
                "paused": "YES" if pool.paused else "no",
                "session": pool.session or "none",
                "leases": pool.leases,
                "epoch": pool.epoch,
                "slots": pool.slots,
                **pool.states,
                "evictable": pool.evictable,
                "pinned": pool.pinned,
                **_registered(pool.registered),
            },
        )
    if offered is not None:
        allocated = sum(host.slabs for host in report.hosts)
        _print_facts("host pool", {**_host_pool(offered), "free slabs": offered.slabs - allocated})
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
                **{f"tenant {each.tenant}": _share(each) for each in host.tenants},
            },
        )
    for kept in report.engine_pools:
        _print_facts(f"device memory of {kept.name}", _engine_pool(kept, report.device_memory_bytes))
    if report.hosts:
        _print_facts("transfers", {name.replace("_", " "): count for name, count in report.transfers.items()})
    _print_facts("counters", dict(sorted(report.counters.items())))


def _share(tenant: TenantStats) -> str:
    return f"{tenant.blocks} blocks, floor {tenant.floor_blocks}, cap {tenant.cap_blocks}"


def _engine_pool(pool: EnginePoolStats, limit_bytes: int) -> dict[str, object]:
    return {
        "pool": pool.pool,
        "namespace": pool.namespace or "unknown",
        "in use": "yes" if pool.used else "no",
        "bytes": f"{pool.size_bytes} of {limit_bytes} for all engines",
        "ranks": pool.ranks,
        "blocks": pool.blocks,
        "warm blocks": pool.named,
    }


def _registered(shards: Sequence[HostRegistration]) -> dict[str, str]:
    told = (
        f"shard {each.shard}: {each.registered_bytes} of {each.size_bytes} bytes"
        + (f" ({each.error})" if each.error else "")
        for each in shards
    )
    return {"registered": "; ".join(told)} if shards else {}


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
    if report.offload is not None:
        most = report.offload.namespaces_max
        _print_facts("host pool", {**_host_pool(report.offload), "namespaces at most": most})
    _print_facts("limits", dict(sorted(report.limits.items())))


def _host_pool(offered: OffloadInfo) -> dict[str, object]:
    return {"slabs": offered.slabs, "bytes per slab": offered.slab_bytes}


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
            "previous block": report.parent.hex() or "none",
            "child runs": report.children,
            **{f"copy in {place.tier}": f"slot {place.slot}, {place.state}" for place in report.places},
        },
    )
    for title, lines in (("held by the requests", report.leases), ("copied by", report.transfers)):
        if lines:
            click.echo(f"\n{title}")
        for line in lines:
            click.echo(f"  {escaped(line)}")


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
    """Lines of `name: value` under a title ("" = none). Nothing is cut, however narrow the terminal is.

    Engines and their users choose some titles, names and values: each stays on its line.
    """
    if title:
        click.echo(f"\n{escaped(title)}")
    shown = {escaped(name): escaped(str(value)) for name, value in facts.items()}
    width = max((len(name) for name in shown), default=0) + 2
    for name, value in shown.items():
        click.echo(f"{'  ' if title else ''}{f'{name}:':<{width}}{value}")


#: Hex digits of a namespace that tell it from others, as in `kvcached stats`.
_NAMESPACE_DIGITS = 16
#: More than the longest line has: what a terminal does with it is the terminal's business.
_WIDTH = 10_000


def print_tree(nodes: Sequence[TreeNode]) -> None:
    """Print runs that come in preorder to stdout. Lines are never cut or wrapped, however narrow the terminal is."""
    console = Console(highlight=False, width=_WIDTH)
    for root in _trees(nodes):
        console.print(root)


def _trees(nodes: Sequence[TreeNode]) -> list[Tree]:
    roots: list[Tree] = []
    path: list[tuple[TreeNode, Tree]] = []  # from a root to where the next node may hang
    for node in nodes:
        while path and path[-1][0].level >= node.level:
            _close(*path.pop())
        if path:
            branch = path[-1][1].add(_label(node))
        else:
            branch = Tree(_label(node))
            roots.append(branch)
        path.append((node, branch))
    while path:
        _close(*path.pop())
    return roots


def _close(node: TreeNode, branch: Tree) -> None:
    """All children of a node that are shown hang on it: say how many are not."""
    if node.hidden:
        branch.add(Text(f"+ {node.hidden} more"))


def _label(node: TreeNode) -> Text:
    """``[0, 740)  a 740/740  host 512/740  pins 2  <key>``; of a root its namespace and the pools of it."""
    if not node.level:
        return Text(f"namespace {node.key.hex()[:_NAMESPACE_DIGITS]}: {', '.join(node.tiers)}")
    marks = [
        f"[{node.start}, {node.start + node.blocks})",
        *(f"{tier} {held}/{node.blocks}" for tier, held in node.tiers.items()),
        *([f"loading {node.loading}"] if node.loading else []),
        *([f"pins {node.pins}"] if node.pins else []),
        node.key.hex(),
    ]
    return Text("  ".join(marks))
