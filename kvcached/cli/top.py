"""The command `kvcached top`: hits, occupancy and copies of a running daemon, again and again."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise, zip_longest
from pathlib import Path
from threading import Event
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from kvcached.cli.options import EPILOG, INTERVAL_S, ask, connect, fields_of, json_option, print_json, run_dir_option
from kvcached.log import escaped

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from kvcached_client.protocol.engine import StatsReport

_DEADLINE_MS: Final = 5000
#: Pictures whose hit rates are kept, for the line of the past and for its longer interval.
HISTORY_LENGTH: Final = 60
_BAR_LENGTH: Final = 16
_HEIGHTS: Final = "▁▂▃▄▅▆▇█"
_SECONDS_PER_MINUTE: Final = 60
_MINUTES_PER_HOUR: Final = 60
#: Rates that a picture shows, by the counters they come from.
_RATES: Final = {
    "requests": "requests",
    "acquires": "leases",
    "committed_blocks": "blocks committed",
    "stored_blocks": "stored in host",
    "loaded_blocks": "loaded from host",
    "evicted_blocks": "evicted from device",
    "host_evicted_blocks": "evicted from host",
    "backed_up_blocks": "stored in storage",
    "prefetched_blocks": "fetched from storage",
}
#: Bytes a second that a picture shows, by the copies they come from.
_BYTE_RATES: Final = {
    "MiB stored in host": ("worker_store", "engine_store"),
    "MiB loaded from host": ("worker_load", "engine_load"),
    "MiB stored in storage": ("storage_store",),
    "MiB fetched from storage": ("storage_load",),
}
_MIB: Final = 1 << 20
#: Blocks that `host_hit_blocks` counts and `missed_blocks` as well.
_UNLOADED: Final = ("load_below_threshold_blocks", "load_over_quota_blocks")
#: Counters that mean trouble as soon as they grow.
_TROUBLES: Final = (
    *("store_failed_blocks", "load_failed_blocks", "corrupt_blocks", "backup_failed_blocks", "prefetch_failed_blocks"),
    *("store_refused_blocks", "no_capacity", "workers_lost", "sessions_expired"),
)


class Hits(NamedTuple):
    """Full blocks of acquired prompts, by where they were found.

    Those in the host pool that were not loaded had to be computed: they are missed, and not hits of the host pool.
    """

    device: int = 0
    host: int = 0
    missed: int = 0

    @classmethod
    def of(cls, counters: Mapping[str, int]) -> Hits:
        """Those that a report counts."""
        unloaded = sum(counters.get(name, 0) for name in _UNLOADED)
        device, host, missed = (counters.get(name, 0) for name in ("hit_blocks", "host_hit_blocks", "missed_blocks"))
        return cls(device, host - unloaded, missed)

    def since(self, earlier: Hits) -> Hits:
        """Those that came after an earlier report of the same daemon."""
        return Hits(*(now - then for now, then in zip(self, earlier, strict=True)))

    @property
    def rate(self) -> float | None:
        """The part that did not have to be computed, 0 to 1; None if nothing was asked for."""
        return (self.device + self.host) / total if (total := sum(self)) else None


class Sample(NamedTuple):
    """A report, and when it came (seconds of a monotonic clock)."""

    at_s: float
    report: StatsReport

    @property
    def hits(self) -> Hits:
        """Since the daemon's start."""
        return Hits.of(self.report.counters)

    def growth(self, earlier: Sample) -> dict[str, int]:
        """By how much each counter has grown."""
        then = earlier.report.counters
        return {name: count - then.get(name, 0) for name, count in self.report.counters.items()}

    def rates(self, earlier: Sample) -> dict[str, float]:
        """The counters of `_RATES` for each second since an earlier sample."""
        seconds, growth = self.at_s - earlier.at_s, self.growth(earlier)
        return {name: growth.get(name, 0) / seconds if seconds > 0 else 0.0 for name in _RATES}

    def mib_rates(self, earlier: Sample) -> dict[str, float]:
        """MiB of each kind of `_BYTE_RATES` for each second since an earlier sample."""
        seconds, now, then = self.at_s - earlier.at_s, self.report.copied_bytes, earlier.report.copied_bytes
        grown = {
            title: sum(now.get(copies, 0) - then.get(copies, 0) for copies in kinds)
            for title, kinds in _BYTE_RATES.items()
        }
        return {title: size_bytes / _MIB / seconds if seconds > 0 else 0.0 for title, size_bytes in grown.items()}


class History:
    """The latest samples of one daemon; those of an earlier one are forgotten."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=HISTORY_LENGTH + 1)

    def add(self, sample: Sample) -> None:
        """Take in a sample. Another epoch is another daemon, whose counters have begun at 0."""
        if self._samples and self._samples[-1].report.daemon_epoch != sample.report.daemon_epoch:
            self._samples.clear()
        self._samples.append(sample)

    @property
    def latest(self) -> Sample:
        """The latest sample."""
        return self._samples[-1]

    @property
    def previous(self) -> Sample:
        """The one before it, or itself."""
        return self._samples[-2] if len(self._samples) > 1 else self.latest

    @property
    def first(self) -> Sample:
        """The oldest that is kept."""
        return self._samples[0]

    def hit_rates(self) -> list[float | None]:
        """The hit rate between each two samples, the latest last."""
        samples = list(self._samples)
        return [now.hits.since(then.hits).rate for then, now in pairwise(samples)]


@click.command(epilog=EPILOG)
@click.option(
    "--interval-s",
    type=INTERVAL_S,
    default=2.0,
    show_default=True,
    help="Seconds between two pictures.",
)
@click.option(
    "--samples",
    type=click.IntRange(1),
    show_default="until Ctrl-C",
    help="End after so many intervals, with exit code 0.",
)
@run_dir_option
@json_option
def top(interval_s: float, samples: int | None, run_dir: Path | None, *, as_json: bool) -> None:
    """Show hits, occupancy and copies until Ctrl-C. Without a terminal, or with --json: a line for each interval."""
    history = _begun(run_dir)
    later = _later_samples(interval_s, samples, run_dir)
    with suppress(KeyboardInterrupt):  # which is how it ends
        if not as_json and _can_show_pictures():
            _show_pictures(history, later)
        else:
            _print_lines(history, later, as_json=as_json)


def watch(interval_s: float, run_dir: Path | None, *, as_json: bool) -> None:
    """`kvcached stats --watch`: the lines of `top`, in a terminal, too."""
    history = _begun(run_dir)
    with suppress(KeyboardInterrupt):
        _print_lines(history, _later_samples(interval_s, None, run_dir), as_json=as_json)


def _begun(run_dir: Path | None) -> History:
    history = History()
    history.add(Sample(monotonic(), ask(run_dir, _DEADLINE_MS, lambda admin: admin.stats())))
    return history


def _later_samples(interval_s: float, count: int | None, run_dir: Path | None) -> Iterator[Sample | str]:
    """A sample after each interval, or why there is none."""
    from kvcached_client.errors import KvcachedError

    pause, taken = Event(), 0
    while count is None or taken < count:
        pause.wait(interval_s)
        taken += 1
        try:
            with connect(run_dir, _DEADLINE_MS) as admin:
                yield Sample(monotonic(), admin.stats())
        except KvcachedError as error:
            yield escaped(str(error))


# --- lines ----------------------------------------------------------------------------------------------------------

#: Fewer than a picture has: a line of 80 columns.
_HEADING: Final = "device  host  missed  hits  committed  stored  loaded  evicted  MiB in  MiB out"


def _print_lines(history: History, later: Iterator[Sample | str], *, as_json: bool) -> None:
    if not as_json:
        click.echo(_HEADING)
    for sample in later:
        if isinstance(sample, str):
            click.echo(f"kvcached: {sample}", err=True)
            continue
        history.add(sample)
        if as_json:
            print_json(figures(history))
        else:
            columns = zip(_cells(history), _HEADING.split("  "), strict=True)
            click.echo("  ".join(f"{each:>{len(name)}}" for each, name in columns))


def figures(history: History) -> dict[str, object]:
    """What a line of JSON holds: the hits since the last sample, the rates, and the latest report."""
    now, before = history.latest, history.previous
    hits = now.hits.since(before.hits)
    return {
        "seconds": now.at_s - before.at_s,
        "hits": {**hits._asdict(), "rate": hits.rate},
        "per_second": now.rates(before),
        "mib_per_second": now.mib_rates(before),
        "stats": fields_of(now.report),
    }


def _cells(history: History) -> list[str]:
    hits = history.latest.hits.since(history.previous.hits)
    now, before = history.latest, history.previous
    rates, mib = now.rates(before), now.mib_rates(before)
    shown = [rates[f"{what}_blocks"] for what in ("committed", "stored", "loaded")]
    shown += [rates["evicted_blocks"] + rates["host_evicted_blocks"]]
    shown += [mib["MiB stored in host"], mib["MiB loaded from host"]]
    return [*map(str, hits), _percent(hits.rate), *map(_short, shown)]


# --- pictures -------------------------------------------------------------------------------------------------------


def _can_show_pictures() -> bool:
    """Whether stdout is a terminal that can replace one picture by the next: with ``TERM=dumb`` it cannot."""
    if not sys.stdout.isatty():
        return False
    from rich.console import Console

    return not Console().is_dumb_terminal


def _show_pictures(history: History, later: Iterator[Sample | str]) -> None:
    from rich.live import Live

    with Live(picture(history), screen=True, auto_refresh=False) as live:
        for sample in later:
            if not isinstance(sample, str):
                history.add(sample)
            live.update(picture(history, sample if isinstance(sample, str) else ""), refresh=True)


def picture(history: History, failure: str = "") -> RenderableType:
    """A screen for a terminal: state, what is wrong, hits, tiers, rates. What a small one cuts off is the end.

    Args:
        history: with a sample at least.
        failure: why the latest question had no answer; the picture is that of the last answer then.
    """
    from rich.console import Group
    from rich.text import Text

    from kvcached.cli.output import cached_blocks

    report = history.latest.report
    state = report.state + (", copies of engines in offload mode paused" if report.offload_paused else "")
    head = f"kvcached: {state}, up {_duration(report.uptime_ms / 1000)}, epoch {report.daemon_epoch}"
    parts: list[RenderableType] = [
        Text(f"{head}, sessions: {report.sessions}, cached blocks: {cached_blocks(report)}", style="bold"),
        *_trouble_lines(history, failure),
        Text(),
        _hit_table(history),
        Text(f"hit rate  {_line_of_past(history.hit_rates())}"),
        Text(),
        _tier_table(report),
        Text(),
        _rate_table(history),
    ]
    return Group(*parts)


def _hit_table(history: History) -> Table:
    table = _table("blocks of prompts", "device", "host", "missed", "hit rate")
    now = history.latest
    for title, hits in (
        ("since the last picture", now.hits.since(history.previous.hits)),
        (f"in the last {_duration(now.at_s - history.first.at_s)}", now.hits.since(history.first.hits)),
        ("since the start", now.hits),
    ):
        table.add_row(title, *(f"{count:,}" for count in hits), _percent(hits.rate))
    return table


def _tier_table(report: StatsReport) -> Table:
    table = _table("tier", "used", "", "slots", "free", "in use", "pinned")
    for pool in report.pools:
        _add_tier(table, f"device of {pool.replica}", pool.slots, pool.states, pool.pinned)
    for host in report.hosts:
        name = ", ".join(host.replicas) or escaped(host.label) or "a cleared namespace"
        slots = host.slots - host.states.get("absent", 0)
        _add_tier(table, f"host of {name}", slots, host.states, host.pinned)
    for kept in report.engine_pools:
        states = {"free": kept.blocks - kept.named}
        _add_tier(table, f"device of {escaped(kept.name)}", kept.blocks, states, 0)
    return table


def _add_tier(table: Table, name: str, slots: int, states: Mapping[str, int], pinned: int) -> None:
    from rich.text import Text

    free = states.get("free", 0)
    busy = sum(states.get(state, 0) for state in ("leased", "filling", "fenced", "quarantined"))
    part = (slots - free) / slots if slots else 0.0
    figures = (f"{part:.0%}", f"{slots:,}", f"{free:,}", f"{busy:,}", f"{pinned:,}")
    table.add_row(Text(name), _bar(part), *figures)  # engines choose names, which may look like markup


def _rate_table(history: History) -> Table:
    now, before = history.latest, history.previous
    named = {_RATES[name]: rate for name, rate in now.rates(before).items()} | now.mib_rates(before)
    rates = [(title, _short(rate)) for title, rate in named.items()]
    table = _table("a second", "", "copies", "")
    copies = [(name.replace("_", " "), str(count)) for name, count in now.report.transfers.items()]
    for rate, copy in zip_longest(rates, copies, fillvalue=("", "")):
        table.add_row(*rate, *copy)
    return table


def _trouble_lines(history: History, failure: str) -> list[Text]:
    from rich.text import Text

    report = history.latest.report
    lines = [f"no answer, the picture is old: {failure}"] if failure else []
    for pool in report.pools:
        if not pool.healthy or pool.degraded or pool.paused or pool.state != "awake":
            named = {"unhealthy": not pool.healthy, "degraded": pool.degraded, "paused": pool.paused}
            words = [
                *([pool.state.replace("_", " ")] if pool.state != "awake" else []),
                *(n for n, is_so in named.items() if is_so),
            ]
            lines.append(f"replica {pool.replica}: {', '.join(words)}{f': {pool.trouble}' if pool.trouble else ''}")
    growth = history.latest.growth(history.first)
    grown = {name: growth.get(name, 0) for name in growth if name in _TROUBLES or name.startswith("errors_")}
    lines += [f"{name.replace('_', ' ')}: +{count:,}" for name, count in sorted(grown.items()) if count]
    return [Text(escaped(line), style="yellow") for line in lines]


def _table(*columns: str) -> Table:
    """A table whose first column is text; the others are figures, and bars."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(columns[0], overflow="fold")  # names of namespaces may be long; figures are never cut
    for column in columns[1:]:
        table.add_column(column, justify="left" if column in {"used", "copies"} else "right", no_wrap=True)
    return table


def _bar(part: float) -> str:
    full = round(part * _BAR_LENGTH)
    return "█" * full + "░" * (_BAR_LENGTH - full)


def _line_of_past(rates: list[float | None]) -> str:
    """A character for each interval: its height is the hit rate, a dot that nothing was asked for."""
    return "".join(
        "·" if rate is None else _HEIGHTS[min(int(rate * len(_HEIGHTS)), len(_HEIGHTS) - 1)] for rate in rates
    )


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.0%}"


def _short(rate: float) -> str:
    """Three digits or more."""
    return f"{rate:,.0f}" if rate >= 100 or rate == int(rate) else f"{rate:.1f}"  # noqa: PLR2004 - a hundred


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), _SECONDS_PER_MINUTE)
    hours, minutes = divmod(minutes, _MINUTES_PER_HOUR)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
