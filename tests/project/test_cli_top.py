"""`kvcached top`: what it computes from reports, its picture, its lines, and a daemon that goes and comes."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console
from rich.screen import Screen

import kvcached_client
from kvcached.__main__ import _told
from kvcached.cli.main import ExitCode, main
from kvcached.cli.top import _BYTE_RATES, _RATES, HISTORY_LENGTH, History, Sample, picture
from kvcached_client.errors import DaemonUnreachable
from kvcached_client.protocol.engine import StatsReport
from tests.project.admins import ConnectedAdmin
from tests.protocol.replies import REPLIES

ASKED = ("top", "--interval-s", "0.1")


def report(counters: dict[str, int], **fields: Any) -> StatsReport:
    """A report that says this, and otherwise what the golden one says."""
    golden = REPLIES["stats_report"][0]
    assert isinstance(golden, StatsReport)
    return msgspec.structs.replace(golden, counters=counters, **fields)


def history(*counters: dict[str, int]) -> History:
    """Samples two seconds apart."""
    made = History()
    for number, each in enumerate(counters):
        made.add(Sample(2.0 * number, report(each)))
    return made


def drawn(shown: History, failure: str = "", width: int = 110) -> str:
    """A picture as text."""
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(picture(shown, failure))
    return capture.get()


class ListedReports(ConnectedAdmin):
    """An `Admin` that gives one report after the other; an error is raised."""

    def __init__(self, *replies: StatsReport | BaseException) -> None:
        self._replies = list(replies)

    def stats(self) -> StatsReport:
        reply = self._replies.pop(0)
        if isinstance(reply, BaseException):
            raise reply
        return reply


def test_hits_of_an_interval_are_those_of_the_interval() -> None:
    """The hit rate of an interval is that of the blocks asked for in it; without any there is none."""
    shown = history(
        {"hit_blocks": 10, "missed_blocks": 90},
        {"hit_blocks": 40, "host_hit_blocks": 30, "missed_blocks": 130},
        {"hit_blocks": 40, "host_hit_blocks": 30, "missed_blocks": 130},
    )

    assert shown.hit_rates() == [0.6, None]
    assert shown.latest.hits.rate == pytest.approx(0.35)


def test_rates_are_by_the_second() -> None:
    """A counter's rate is its growth over the seconds between two samples."""
    shown = history({"stored_blocks": 5}, {"stored_blocks": 25})

    assert shown.latest.rates(shown.previous)["stored_blocks"] == 10


def test_bytes_are_by_the_second_whoever_copied_them() -> None:
    """What workers and engines have stored in the host pool is one figure, in MiB."""
    shown = History()
    for number, copied in enumerate(({"worker_store": 5 << 20}, {"worker_store": 7 << 20, "engine_store": 4 << 20})):
        shown.add(Sample(2.0 * number, report({}, copied_bytes=copied)))

    rates = shown.latest.mib_rates(shown.previous)
    assert (rates["MiB stored in host"], rates["MiB loaded from host"]) == (3.0, 0.0)
    assert any(line.split() == ["MiB", "stored", "in", "host", "3"] for line in drawn(shown).splitlines())


def test_counters_of_another_daemon_are_not_compared() -> None:
    """After a restart of the daemon the history begins anew: no rate is negative."""
    shown = history({"hit_blocks": 900, "missed_blocks": 100})
    shown.add(Sample(2.0, report({"hit_blocks": 3}, daemon_epoch=301)))

    assert shown.hit_rates() == []
    assert shown.latest.rates(shown.previous)["acquires"] == 0


def test_history_is_bounded() -> None:
    """As many intervals are kept as a line of the past has characters."""
    shown = history(*({"missed_blocks": number} for number in range(HISTORY_LENGTH + 9)))

    assert shown.hit_rates() == [0.0] * HISTORY_LENGTH


def test_picture_shows_tiers_hits_and_troubles() -> None:
    """A picture has each tier with its occupancy, the hits, what is wrong, and errors that have come."""
    shown = history({"missed_blocks": 1}, {"hit_blocks": 3, "missed_blocks": 2, "errors_limit": 4})

    lines = [line.rstrip() for line in drawn(shown, "gone").splitlines()]

    assert any(line.split()[-4:] == ["3", "0", "1", "75%"] for line in lines)
    assert any(line.startswith("device of default") and " 30% " in line for line in lines)
    assert any(line.startswith("host of default, other") and " 25% " in line for line in lines)
    assert any(line.startswith("device of model tp2") and " 67% " in line for line in lines)
    assert "replica default: falling asleep, degraded: CUDA device 0: lost" in lines
    assert "errors limit: +4" in lines
    assert "no answer, the picture is old: gone" in lines


@pytest.mark.parametrize("name", ["qwen[/x]", "[red]a[/red]", "a [link=https://elsewhere] b", ":warning:"])
def test_names_are_no_markup(name: str) -> None:
    """A name that an engine has chosen stands in a picture as it is, even if it looks like rich's markup."""
    golden = report({})
    hosts = tuple(msgspec.structs.replace(host, replicas=(), label=name) for host in golden.hosts)
    kept = tuple(msgspec.structs.replace(pool, name=name) for pool in golden.engine_pools)
    shown = History()
    shown.add(Sample(0.0, report({}, hosts=hosts, engine_pools=kept)))

    lines = drawn(shown).splitlines()

    assert any(line.startswith(f"host of {name} ") for line in lines)
    assert any(line.startswith(f"device of {name} ") for line in lines)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_picture_can_be_drawn_in_every_encoding(encoding: str, tmp_path: Path) -> None:
    """A terminal without characters for bars gets other ones, and question marks for names that it cannot show."""
    golden = report({})
    kept = tuple(msgspec.structs.replace(pool, name="模型") for pool in golden.engine_pools)
    shown = history({"missed_blocks": 1}, {"hit_blocks": 3, "missed_blocks": 2}, {"hit_blocks": 3, "missed_blocks": 2})
    shown.add(Sample(6.0, report({"hit_blocks": 3, "missed_blocks": 2}, engine_pools=kept)))
    with (tmp_path / "seen").open("w", encoding=encoding) as file:
        Console(file=_told(file), width=110, color_system=None).print(picture(shown))

    seen = (tmp_path / "seen").read_text(encoding=encoding)
    assert "hit rate  7" in seen
    assert re.search(r"^device of \?\? +#+-+ ", seen, re.MULTILINE)


@pytest.mark.parametrize("failure", ["", "gone"])
def test_troubles_are_seen_on_a_terminal_of_24_rows(failure: str) -> None:
    """What is wrong stands directly behind the headline: a small terminal cuts off the rest."""
    golden = report({})
    pools = tuple(msgspec.structs.replace(pool, state="awake", paused=True, trouble="") for pool in golden.pools)
    shown = History()
    shown.add(Sample(0.0, report({}, pools=pools)))
    console = Console(width=80, height=24, color_system=None)
    with console.capture() as capture:
        console.print(Screen(picture(shown, failure)))

    lines = [line.rstrip() for line in capture.get().splitlines()]

    assert len(lines) == 24
    troubles = lines[2 : lines.index("")]  # the headline takes two rows of 80 columns
    assert troubles == [
        *([f"no answer, the picture is old: {failure}"] if failure else []),
        *(f"replica {pool.replica}: degraded, paused" for pool in pools),
    ]


def test_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that cannot replace a picture by the next one gets what there is without a terminal."""
    monkeypatch.setattr(kvcached_client, "Admin", ListedReports(report({}), report({"hit_blocks": 9})))
    monkeypatch.setenv("TERM", "dumb")
    terminal, end = os.openpty()
    with os.fdopen(end, "w") as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        main([*ASKED, "--samples", "1"], standalone_mode=False)
        stdout.flush()
        said = b""
        while said.count(b"\n") < 2:  # the kernel hands on what was written in its own time
            said += os.read(terminal, 1 << 16)
        heading, line = said.decode().splitlines()
    os.close(terminal)

    assert heading.split()[:4] == ["device", "host", "missed", "hits"]
    assert line.split()[:4] == ["9", "0", "0", "100%"]


def test_picture_fits_a_terminal_of_80_columns() -> None:
    """No figure is cut off at 80 columns."""
    shown = drawn(history({"hit_blocks": 3}, {"hit_blocks": 3_000_000}), width=80)

    assert "…" not in shown
    assert "3,000,000" in shown


def test_lines_follow_a_daemon_over_its_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal each interval is a line; while there is no daemon, the reason is on stderr."""
    first, second = report({"missed_blocks": 4}), report({"hit_blocks": 9, "missed_blocks": 7})
    later = report({"hit_blocks": 1}, daemon_epoch=301)
    replies = ListedReports(first, second, DaemonUnreachable("no daemon"), later)
    monkeypatch.setattr(kvcached_client, "Admin", replies)

    result = CliRunner().invoke(main, [*ASKED, "--samples", "3"])

    assert result.exit_code == ExitCode.OK
    heading, before, after = result.stdout.splitlines()
    assert heading.split()[:4] == ["device", "host", "missed", "hits"]
    assert before.split()[:4] == ["9", "0", "3", "75%"]
    assert after.split()[:4] == ["0", "0", "0", "-"]
    assert result.stderr == "kvcached: no daemon\n"
    assert len(heading) <= 80


def test_line_sums_up_evictions_and_shows_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a second, a line has blocks committed, stored, loaded, and evicted in both tiers, and MiB in and out."""
    monkeypatch.setattr(Sample, "rates", lambda now, then: {**dict.fromkeys(_RATES, 0.0), **now.growth(then)})
    monkeypatch.setattr(Sample, "mib_rates", lambda *_: {name: float(len(name)) for name in _BYTE_RATES})
    grown = {"committed_blocks": 8, "stored_blocks": 6, "evicted_blocks": 2, "host_evicted_blocks": 4}
    monkeypatch.setattr(kvcached_client, "Admin", ListedReports(report({}), report(grown)))

    heading, line = CliRunner().invoke(main, [*ASKED, "--samples", "1"]).stdout.splitlines()

    assert heading.split()[4:] == ["committed", "stored", "loaded", "evicted", "MiB", "in", "MiB", "out"]
    assert line.split()[4:] == ["8", "6", "0", "6", "18", "20"]


def test_json_has_hits_rates_and_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --json each interval is one document: its hits and rates, and what `stats` prints."""
    monkeypatch.setattr(kvcached_client, "Admin", ListedReports(report({}), report({"hit_blocks": 2, "acquires": 1})))

    (line,) = CliRunner().invoke(main, [*ASKED, "--samples", "1", "--json"]).stdout.splitlines()

    told = json.loads(line)
    assert told["hits"] == {"device": 2, "host": 0, "missed": 0, "rate": 1.0}
    assert told["per_second"]["acquires"] == pytest.approx(1 / told["seconds"])
    assert told["stats"]["counters"] == {"hit_blocks": 2, "acquires": 1}


def test_stats_watch_prints_the_same_lines_until_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """`stats --watch` is `top` in lines, in a terminal, too; Ctrl-C is its end."""
    replies = ListedReports(report({}), report({"hit_blocks": 9, "missed_blocks": 3}), KeyboardInterrupt())
    monkeypatch.setattr(kvcached_client, "Admin", replies)

    result = CliRunner().invoke(main, ["stats", "--watch", "0.1"])

    heading, line = result.stdout.splitlines()
    assert (result.exit_code, heading.split()[:2]) == (ExitCode.OK, ["device", "host"])
    assert line.split()[:4] == ["9", "0", "3", "75%"]


def test_top_needs_a_daemon_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no daemon answers the first question, the exit code says so."""
    monkeypatch.setattr(kvcached_client, "Admin", ListedReports(DaemonUnreachable("no daemon")))

    assert CliRunner().invoke(main, [*ASKED]).exit_code == ExitCode.UNREACHABLE


@pytest.mark.parametrize("seconds", ["nan", "-nan", "inf", "0", "0.09"])
@pytest.mark.parametrize("command", [["top", "--interval-s"], ["stats", "--watch"]])
def test_interval_is_a_number_that_floods_no_daemon(
    command: list[str], seconds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is no number, or is below a tenth of a second, is wrong usage, and asks the daemon nothing."""
    monkeypatch.setattr(kvcached_client, "Admin", ListedReports())

    result = CliRunner().invoke(main, [*command, seconds])

    assert (result.exit_code, result.stdout) == (ExitCode.USAGE, "")
