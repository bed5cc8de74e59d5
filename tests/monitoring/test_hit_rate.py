"""The hit rate as `kvcached top`, the dashboard and docs/monitoring.md have it: what was computed is no hit."""

from __future__ import annotations

import promql_parser as promql
import pytest

from kvcached.cli.top import Hits
from tests.monitoring.promql import Labels, Samples, evaluate
from tests.monitoring.registry import metrics_of
from tests.monitoring.test_documents import page_queries, panels
from tests.service.office import SLOTS, FakePeer, Office, key_chain

PROMPT = key_chain(3)
#: Prompts that are acquired between two scrapes.
PROMPTS = 4
FIRST_S, LAST_S = 0.0, 60.0
BLOCKS = 3 * PROMPTS


@pytest.fixture
def office() -> Office:
    """A replica whose host pool alone has a prompt."""
    made = Office("a", host_slabs=4)
    made.enter(FakePeer(7))
    for chain in (PROMPT, key_chain(SLOTS, seed=9)):
        made.store(chain)
        made.workers["a"].end_all()
    return made


def asked(office: Office) -> tuple[Hits, Samples]:
    """Acquire the prompt some times: the hits of that time, and what was scraped before and after it."""
    samples = Samples()
    before = dict(office.cache.counters)
    scrape(office, samples, FIRST_S)
    for number in range(PROMPTS):
        office.ask(office.acquire(PROMPT, f"prompt {number}"), PROMPT)
    scrape(office, samples, LAST_S)
    return Hits.of(office.cache.counters).since(Hits.of(before)), samples


def scrape(office: Office, samples: Samples, at_s: float) -> None:
    for family in metrics_of(office).values():
        for sample in family.samples:
            samples.add(sample.name, at_s, sample.value, sample.labels | {"instance": "node"})


def value_of(query: str, samples: Samples) -> float:
    query = query.replace("$__rate_interval", "5m").replace("$instance", ".*")
    vector: dict[Labels, float] = evaluate(promql.parse(query), samples, LAST_S)
    return vector[frozenset()]


def panel(title: str) -> dict[str, str]:
    """The queries of a panel, by their legends."""
    (found,) = [each for each in panels() if each["title"] == title]
    return {target["legendFormat"]: target["expr"] for target in found["targets"]}


@pytest.mark.parametrize(
    ("threshold", "quota", "loaded"),
    [
        pytest.param(8, 100, 0, id="below the threshold"),
        pytest.param(1, 2, 2, id="over the quota"),
        pytest.param(1, 100, 3, id="all are loaded"),
    ],
)
def test_blocks_that_are_not_loaded_are_no_hits(office: Office, threshold: int, quota: int, loaded: int) -> None:
    """Blocks of the host pool that are computed instead of loaded count once, as missed, wherever a rate is shown."""
    pool = office.cache.pools["a"]
    pool.load_threshold, pool.load_quota = threshold, quota

    hits, samples = asked(office)

    found = loaded * PROMPTS  # what a prompt loads, the others hit: in the host pool, or on the device by then
    assert (hits.device + hits.host, hits.missed) == (found, BLOCKS - found)
    assert hits.rate == found / BLOCKS
    assert value_of(dict(page_queries())["hit rate"], samples) == pytest.approx(hits.rate)
    assert value_of(panel("Blocks that were found")["found"], samples) == pytest.approx(hits.rate)
    tiers = {name: value_of(query, samples) for name, query in panel("Blocks of prompts by tier").items()}
    assert tiers == pytest.approx({"device": hits.device / 300, "host": hits.host / 300, "computed": hits.missed / 300})
