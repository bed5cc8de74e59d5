"""What `kvcached stats` prints for people."""

from __future__ import annotations

import msgspec
import pytest

from kvcached.cli.output import print_stats
from kvcached_client.protocol.engine import StatsReport
from tests.protocol.replies import REPLIES

FORGED = "x\nstate: FORGED\x1b[2J"


def test_label_of_an_engine_forges_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    """What an engine calls its namespace stays on one line, with control characters written out."""
    report = REPLIES["stats_report"][0]
    assert isinstance(report, StatsReport)
    hosts = tuple(msgspec.structs.replace(host, replicas=(), label=FORGED) for host in report.hosts)
    print_stats(msgspec.structs.replace(report, hosts=hosts))

    out = capsys.readouterr().out
    assert "host pool of x\\nstate: FORGED\\x1b[2J\n" in out
    assert "\nstate: FORGED" not in out
