"""What `kvcached stats`, `inspect` and `explain` print for people of names that engines choose."""

from __future__ import annotations

import msgspec
import pytest

from kvcached.cli.explain import lines_of
from kvcached.cli.output import print_block, print_stats
from kvcached.cli.prompt_keys import Verdict
from kvcached_client.protocol.engine import Explanation, InspectReport, StatsReport
from kvcached_client.types import MissReason
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


def test_name_of_a_request_forges_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    """What an engine calls a request that holds a block stays on one line, with control characters written out."""
    print_block(InspectReport(id=1, found=True, leases=(FORGED,)))

    assert "\n  x\\nstate: FORGED\\x1b[2J\n" in capsys.readouterr().out


def test_explanation_forges_no_line() -> None:
    """What an engine calls its namespace stays on the line that says where the prompt was looked for."""
    explanation = Explanation(
        namespace="00" * 8,
        replica="",
        label=FORGED,
        generation=0,
        block_size=4,
        device=0,
        host=1,
        hit=1,
        key=bytes(16),
        reason=MissReason.HIT,
        others=0,
    )

    (line,) = lines_of(Verdict(explanation, 1, None))
    assert line.startswith("x\\nstate: FORGED\\x1b[2J, namespace 00")
