"""Alert rules, played against samples as a scrape would take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, repeat

import pytest
import yaml

from kvcached.core.slots.states import PoolState
from kvcached.monitoring.families import STORAGE_STATES
from kvcached.storage.client import FIRST_PAUSE_S, HUNG_TIMEOUTS, LONGEST_PAUSE_S
from tests.monitoring.promql import Samples, fires_at_s
from tests.monitoring.test_documents import ALERTS

HOUR_S = 3600.0
#: A state of storage, and for how long it lasts.
Phase = tuple[str, float]


def rule_of(alert: str) -> dict[str, str]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    (rule,) = [each for each in group["rules"] if each["alert"] == alert]
    return {key: rule[key] for key in ("expr", "for")}


def storage_samples(phases: Iterator[Phase], scrape_s: float) -> Samples:
    """The samples of an hour."""
    samples = Samples()
    state, end_s = next(phases)
    for number in range(int(HOUR_S / scrape_s)):
        at_s = number * scrape_s
        while at_s >= end_s:
            state, lasts_s = next(phases)
            end_s += lasts_s
        for each in STORAGE_STATES:
            labels = {"instance": "node", "state": each}
            samples.add("kvcached_storage_state", at_s, float(each == state), labels)
    return samples


def pauses_s() -> Iterator[float]:
    pause_s = FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def hung_device(timeout_s: float) -> Iterator[Phase]:
    """Each storage process opens, hangs in its first call, and is killed at last."""
    for pause_s in pauses_s():
        yield from (("starting", 1.0), ("ready", timeout_s))
        yield from (("suspended", timeout_s * (HUNG_TIMEOUTS - 1)), ("waiting", pause_s))


def crashes(lives_s: float) -> Iterator[Phase]:
    """Each storage process dies after a short life."""
    for pause_s in pauses_s():
        yield from (("starting", 2.0), ("ready", lives_s), ("waiting", pause_s))


TROUBLES: dict[str, Callable[[], Iterator[Phase]]] = {
    "hangs": lambda: hung_device(5.0),
    "hangs_slowly": lambda: hung_device(60.0),
    "dies_at_once": lambda: crashes(0.0),
    "dies_soon": lambda: crashes(8.0),
    "read_only": lambda: chain([("starting", 1.0), ("ready", 300.0)], repeat(("read_only", HOUR_S))),
    "suspended": lambda: chain([("starting", 1.0), ("ready", 300.0)], repeat(("suspended", HOUR_S))),
    "never_starts": lambda: repeat(("starting", HOUR_S)),
}
WELL: dict[str, Callable[[], Iterator[Phase]]] = {
    "works": lambda: chain([("starting", 20.0)], repeat(("ready", HOUR_S))),
    "fails_once": lambda: chain([("ready", 900.0), ("suspended", 120.0), ("waiting", 30.0)], repeat(("ready", HOUR_S))),
    "detached": lambda: chain([("ready", 60.0), ("detached", 1200.0), ("starting", 9.0)], repeat(("ready", HOUR_S))),
}


@pytest.mark.parametrize("scrape_s", [5.0, 15.0, 30.0])
@pytest.mark.parametrize("trouble", TROUBLES)
def test_storage_that_does_not_work_raises_an_alert(trouble: str, scrape_s: float) -> None:
    """Storage that hangs, dies again and again, or takes nothing is told of within half an hour, in whatever states."""
    fired_s = fires_at_s(rule_of("KvcachedStorageDown"), storage_samples(TROUBLES[trouble](), scrape_s), HOUR_S)

    assert fired_s is not None
    assert fired_s <= HOUR_S / 2


@pytest.mark.parametrize("case", WELL)
def test_storage_that_works_raises_none(case: str) -> None:
    """A start, a short failure, and storage that an administrator has detached are no alert."""
    assert fires_at_s(rule_of("KvcachedStorageDown"), storage_samples(WELL[case](), 15.0), HOUR_S) is None


@pytest.mark.parametrize(("away_s", "fires"), [(60.0, False), (600.0, True)])
def test_clears_that_are_not_followed_are_told(away_s: float, fires: bool) -> None:
    """A record that nobody can read for minutes fires; a service that restarts within a minute does not."""
    samples, scrape_s, began_s = Samples(), 15.0, 1000.0
    for number in range(int(HOUR_S / scrape_s)):
        at_s = number * scrape_s
        is_away = began_s <= at_s < began_s + away_s
        age_s = at_s - began_s if is_away else at_s % 5
        samples.add("kvcached_storage_record_age_seconds", at_s, age_s, {"instance": "node"})

    assert (fires_at_s(rule_of("KvcachedClearsNotFollowed"), samples, HOUR_S) is not None) == fires


def slots_for(lasts_s: float, metric: str, place: Mapping[str, str], slots: Mapping[str, int]) -> Samples:
    """Samples of an hour: slots that are so in the middle of it, and else free."""
    samples, scrape_s, began_s = Samples(), 15.0, 1000.0
    for number in range(int(HOUR_S / scrape_s)):
        at_s = number * scrape_s
        is_so = began_s <= at_s < began_s + lasts_s
        for state in ("free", "cached", "filling", "quarantined"):
            count = slots.get(state, 0) if is_so else sum(slots.values()) * (state == "free")
            samples.add(metric, at_s, float(count), {"instance": "node", "state": state, **place})
    return samples


DEVICE = ("kvcached_device_slots", {"replica": "a"})
HOST = ("kvcached_host_slots", {"namespace": "03" * 8, "name": "qwen3-8b"})


@pytest.mark.parametrize(
    ("place", "slots", "lasts_s", "fires"),
    [
        (DEVICE, {"free": 12, "quarantined": 4}, 600.0, True),
        (DEVICE, {"free": 13, "quarantined": 3}, 600.0, False),
        (HOST, {"free": 900, "cached": 75, "quarantined": 25}, 600.0, True),
        (HOST, {"free": 900, "cached": 80, "filling": 5, "quarantined": 15}, 600.0, False),
        (HOST, {"free": 1000}, 600.0, False),
        (HOST, {"free": 900, "quarantined": 100}, 120.0, False),
    ],
)
def test_slots_that_stay_set_aside_are_told(
    place: tuple[str, dict[str, str]], slots: dict[str, int], lasts_s: float, fires: bool
) -> None:
    """A fifth of a device pool, or of the host slots that a namespace uses, fires; less does not, nor a short time."""
    samples = slots_for(lasts_s, *place, slots)

    assert (fires_at_s(rule_of("KvcachedSlotsQuarantined"), samples, HOUR_S) is not None) == fires


@pytest.mark.parametrize(("state", "fires"), [("awake", True), ("asleep", False), ("waking", False)])
def test_only_a_pool_that_is_awake_misses_its_workers(state: str, fires: bool) -> None:
    """No healthy workers fire where the pool is awake; one that sleeps has none on purpose."""
    samples = Samples()
    for number in range(int(HOUR_S / 15.0)):
        samples.add("kvcached_workers_healthy", number * 15.0, 0.0, {"instance": "node", "replica": "a"})
        for each in PoolState:
            labels = {"instance": "node", "replica": "a", "state": str(each)}
            samples.add("kvcached_device_pool_state", number * 15.0, float(each == state), labels)

    assert (fires_at_s(rule_of("KvcachedWorkersDown"), samples, HOUR_S) is not None) == fires
