"""The pages of a daemon whose workers are fakes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from http import HTTPStatus
from typing import TypeVar

import msgspec
import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from kvcached.monitoring import pages as pages_module
from kvcached.server.http import Page
from kvcached_client.protocol import engine as wire
from tests.monitoring.registry import SLABS, metrics_of, pages_of
from tests.service.office import Office

T = TypeVar("T")
#: As Prometheus 3 asks.
ACCEPT = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.4,*/*;q=0.1"
)


@pytest.fixture
def office() -> Office:
    return Office("a", host_slabs=SLABS)


def run(main: Coroutine[None, None, T]) -> T:
    return asyncio.run(main)


def get(office: Office, path: str, accept: str = "") -> Page:
    return run(pages_of(office).get(path, accept))


def test_livez_says_ok(office: Office) -> None:
    """An event loop that has a turn answers, whatever the workers do."""
    office.workers["a"].answers = False

    assert get(office, "/livez") == Page(HTTPStatus.OK, b"ok\n")


def test_readyz_is_what_health_finds(office: Office) -> None:
    """A daemon that works is ready, and each part of the check is a line."""
    page = get(office, "/readyz")

    assert page.status == HTTPStatus.OK
    assert page.body.splitlines()[:2] == [b"ok a/acquire", b"ok a/workers"]
    assert office.workers["a"].probes


def test_readyz_says_why_not(office: Office) -> None:
    """A worker that fails makes the daemon not ready, with the reason."""
    office.workers["a"].failure = "shard 1 does not copy"

    page = get(office, "/readyz")

    assert page.status == HTTPStatus.SERVICE_UNAVAILABLE
    assert b"FAILED a/workers shard 1 does not copy\n" in page.body


def test_readyz_of_a_check_that_is_refused_says_why(office: Office) -> None:
    """Where too many checks are under way already, the daemon is not ready, and says that."""
    office.workers["a"].answers = False

    async def main() -> Page:
        for _ in range(16):
            office.ask_late(wire.Health(id=office.next_id()))
        page = await pages_of(office).get("/readyz", "")
        office.service.close()
        return page

    page = run(main())
    assert page.status == HTTPStatus.SERVICE_UNAVAILABLE
    assert b"16 requests wait" in page.body


def test_checks_are_shared(office: Office) -> None:
    """All who ask while a check runs, and for a moment afterwards, get its result; who gives up ends it for nobody."""

    async def main() -> list[HTTPStatus]:
        pages = pages_of(office)
        impatient = asyncio.create_task(pages.get("/readyz", ""))
        others = [asyncio.create_task(pages.get("/readyz", "")) for _ in range(5)]
        await asyncio.sleep(0)
        impatient.cancel()
        return [page.status for page in [*await asyncio.gather(*others), await pages.get("/readyz", "")]]

    assert run(main()) == [HTTPStatus.OK] * 6
    assert len(office.workers["a"].probes) == 1


def test_check_is_made_anew_after_a_moment(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result is not kept for longer than it says."""
    monkeypatch.setattr(pages_module, "HEALTH_S_MIN", 0.0)

    async def main() -> list[HTTPStatus]:
        pages = pages_of(office)
        first = await pages.get("/readyz", "")
        office.workers["a"].failure = "it broke"
        return [first.status, (await pages.get("/readyz", "")).status]

    assert run(main()) == [HTTPStatus.OK, HTTPStatus.SERVICE_UNAVAILABLE]


def test_metrics_are_what_the_parsers_of_both_formats_read(office: Office) -> None:
    """Both formats, written in pieces, are read back with every family, each once, and as many samples."""
    text, open_metrics = get(office, "/metrics"), get(office, "/metrics", ACCEPT)

    assert text.content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert open_metrics.content_type.startswith("application/openmetrics-text; version=1.0.0")
    plain = list(parse_text(text.body.decode()))
    strict = list(parse_open_metrics(open_metrics.body.decode()))  # type: ignore[no-untyped-call]
    expected = metrics_of(office, storage=pages_of(office)._snapshot().storage)
    assert [family.name for family in strict] == list(expected)
    assert {family.name for family in plain} == set(expected)
    for family in strict:
        assert len(family.samples) == len(expected[family.name].samples), family.name


def test_value_with_ends_of_lines_is_read_back_whole(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a label's value contains takes nothing from a family that is written in pieces, in either format."""
    values = [f"value {number}" for number in range(60)]
    values[55] = "one\r# two\x0b# three\x85# four\n# five\\"
    family = GaugeMetricFamily("kvcached_gauge", "Of a test.", labels=("name",))
    for value in values:
        family.add_metric((value,), 1)
    monkeypatch.setattr(pages_module, "families", lambda _: iter([family]))

    text, open_metrics = get(office, "/metrics").body.decode(), get(office, "/metrics", ACCEPT).body.decode()

    (plain,) = parse_text(text)
    (strict,) = parse_open_metrics(open_metrics)  # type: ignore[no-untyped-call]
    assert [sample.labels["name"] for sample in plain.samples] == values
    assert [sample.labels["name"] for sample in strict.samples] == values


def test_engines_get_a_turn_while_metrics_are_written(office: Office) -> None:
    """Between two pieces of a page, the event loop serves whoever has asked something."""

    async def main() -> int:
        page = asyncio.create_task(pages_of(office).get("/metrics", ""))
        turns = 0
        while not page.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert run(main()) > 100


def test_status_has_the_report_of_stats(office: Office) -> None:
    """/status.json has the fields of `kvcached stats --json`."""
    page = get(office, "/status.json")
    report = office.expect(wire.StatsReport, wire.Stats(id=office.next_id()))
    fields = {name: msgspec.to_builtins(getattr(report, name)) for name in report.__struct_fields__ if name != "id"}
    fields["counters"]["requests"] -= 1
    served = json.loads(page.body)

    assert page.content_type == "application/json"
    assert {name: served[name] for name in fields} == json.loads(json.dumps(fields)) | {
        "counters": fields["counters"] | {"requests": served["counters"]["requests"]}
    }
    assert 0 < served["counters"]["requests"] <= fields["counters"]["requests"]


def test_other_paths_name_those_that_there_are(office: Office) -> None:
    """An unknown path is not found, and the answer lists the known ones."""
    page = get(office, "/page/none.js")

    assert page.status == HTTPStatus.NOT_FOUND
    assert page.body == b"there is nothing here, only /, /livez, /readyz, /metrics, /status.json, /tree.json\n"
