"""docs/monitoring.md, the dashboard and the alert rules, held to what a registry exports."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser as promql
import pytest
import yaml
from prometheus_client.core import Metric

from tests.monitoring.registry import every_metric, queryable, rows
from tests.project.source_tree import ROOT

#: Labels that Prometheus adds to what it scrapes, and its own metric of a scrape.
TARGET_LABELS = {"job", "instance"}
UP = ("up", set[str]())
PAGE = ROOT / "docs/monitoring.md"
ALERTS = ROOT / "docs/monitoring/alerts.yaml"
DASHBOARD = ROOT / "docs/monitoring/dashboard.json"


@pytest.fixture(scope="module")
def metrics() -> dict[str, Metric]:
    async def make() -> dict[str, Metric]:
        return every_metric()

    return asyncio.run(make())


def alert_rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    """Every query of the dashboard, of the alert rules and of the page, and where it stands."""
    for rule in alert_rules():
        yield rule["alert"], rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    yield from page_queries()


def page_queries() -> Iterator[tuple[str, str]]:
    """Every query of the page: the hit rate's, which is long, and those of a table."""
    page = PAGE.read_text()
    (hit_rate,) = re.findall(r"```promql\n(.*?)```", page, re.DOTALL)
    yield "hit rate", hit_rate
    yield from re.findall(r"^\| ([^`|]+) \| `(.*kvcached_.*)` \|$", page, re.MULTILINE)


def used(query: str) -> tuple[list[promql.VectorSelector], set[str]]:
    """The metrics that a query selects, and the labels by which it aggregates or matches."""
    selected: list[promql.VectorSelector] = []
    labels: set[str] = set()

    def visit(node: promql.Expr) -> None:
        if isinstance(node, promql.VectorSelector):
            selected.append(node)
        modifier = getattr(node, "modifier", None)
        matching = modifier.matching if isinstance(modifier, promql.BinModifier) else modifier
        if isinstance(matching, promql.LabelModifier | promql.AggModifier):
            labels.update(matching.labels)

    promql.walk(promql.parse(query.replace("$__rate_interval", "5m")), visit)
    return selected, labels


def test_page_has_every_metric_and_no_other(metrics: dict[str, Metric]) -> None:
    """docs/monitoring.md has a row for each family with its type, labels and meaning, and no row without a family."""
    written = [line for line in PAGE.read_text().splitlines() if re.match(r"\| `(kvcached|process)_", line)]

    assert sorted(written) == sorted(rows(metrics))


@pytest.mark.parametrize(("place", "query"), list(queries()), ids=lambda text: text[:40])
def test_query_names_what_is_exported(place: str, query: str, metrics: dict[str, Metric]) -> None:
    """Each metric and label in a query of the dashboard, of an alert rule or of the page is one that is exported."""
    exported = dict([*queryable(metrics), UP])

    selected, grouped = used(query)

    assert selected, place
    known: set[str] = set(TARGET_LABELS)
    for selector in selected:
        assert selector.name in exported
        labels = exported[selector.name] | TARGET_LABELS
        assert {matcher.name for matcher in selector.matchers.matchers} <= labels
        known |= labels
    assert grouped <= known


@pytest.mark.parametrize(("place", "query"), list(queries()), ids=lambda text: text[:40])
def test_query_names_values_that_labels_have(place: str, query: str, metrics: dict[str, Metric]) -> None:
    """A value that a query compares a label with is one that a sample has."""
    samples = [sample for family in metrics.values() for sample in family.samples]
    for selector in used(query)[0]:
        for matcher in selector.matchers.matchers:
            if matcher.name in TARGET_LABELS:
                continue
            values = {sample.labels.get(matcher.name) for sample in samples if sample.name == selector.name}
            assert set(matcher.value.split("|")) <= values, place


def test_queries_are_found() -> None:
    """The three documents have queries, so that the checks above check something."""
    places = [place for place, _ in queries()]

    assert len(alert_rules()) > 10
    assert len(panels()) > 10
    assert "99th percentile of an acquire" in places


def test_alert_rules_say_what_to_do() -> None:
    """Each rule has a name of its own, a severity, a summary and a description."""
    rules = alert_rules()

    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"].endswith(".")


def test_only_a_daemon_that_does_not_answer_is_critical() -> None:
    """Who is called for what is critical is called where no engine is served; all else costs hits or time."""
    critical = [rule["alert"] for rule in alert_rules() if rule["labels"]["severity"] == "critical"]

    assert critical == ["KvcachedDown"]


def test_legends_name_labels_that_remain() -> None:
    """A legend shows only labels by which its query aggregates."""
    for panel in panels():
        for target in panel["targets"]:
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"])) - TARGET_LABELS
            assert shown <= used(target["expr"])[1], panel["title"]


def test_panels_lie_side_by_side() -> None:
    """No two panels of the dashboard overlap, and each has an id of its own."""
    every = json.loads(DASHBOARD.read_text())["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in every)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]

    assert len({panel["id"] for panel in every}) == len(every)
    assert len(set(cells)) == len(cells)


def test_panel_of_replicas_without_workers_counts_those_of_the_alert() -> None:
    """A replica that sleeps has no workers on purpose: the panel leaves it out, as the alert does."""
    (rule,) = [each["expr"] for each in alert_rules() if each["alert"] == "KvcachedWorkersDown"]
    (panel,) = [each for each in panels() if each["title"] == "Replicas without workers"]
    (target,) = panel["targets"]

    query = re.sub(r'instance=~"\$instance"(, )?', "", target["expr"]).replace("{}", "")
    assert query == f"count({rule}) or vector(0)"
