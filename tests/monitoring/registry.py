"""The metrics of a fake daemon, and how the documents have to name them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from kvcached.monitoring.families import families
from kvcached.monitoring.pages import DaemonPages, HostSize
from kvcached_client.protocol import engine as wire
from tests.service.office import SLAB_BYTES, Office

SLABS = 2
#: What a fake daemon has too little of to have samples: storage.
STORAGE = wire.StorageReport(
    id=0, backend="disk", state="ready", why="", backup="every", restarts=0,
    blocks=3, size_bytes=300, capacity_bytes=900, counters={"written_blocks": 3, "forgets_due": 1},
    record_age_ms=4000, local_disk=wire.LocalDisk(blocks=2, size_bytes=200, capacity_bytes=800, read_blocks=7),
)  # fmt: skip


def pages_of(office: Office, slabs: int = SLABS) -> DaemonPages:
    """The pages of a fake daemon with a host pool of so many slabs."""
    return DaemonPages(office.service, HostSize(slabs, SLAB_BYTES), {})


def metrics_of(office: Office, *, storage: wire.StorageReport = STORAGE) -> dict[str, Metric]:
    """Every family, by name."""
    snapshot = pages_of(office)._snapshot()._replace(storage=storage)
    return {family.name: family for family in families(snapshot)}


def every_metric() -> dict[str, Metric]:
    """The families of a daemon that has everything: a device pool, a host pool, storage."""
    return metrics_of(Office("a", host_slabs=SLABS, spaces=1))


def exported_name(family: Metric) -> str:
    """The name in queries."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def labels_of(family: Metric) -> tuple[str, ...]:
    """The names of a family's labels, in their order; without those that a histogram has by itself."""
    return tuple(getattr(family, "_labelnames", ()))


def queryable(metrics: dict[str, Metric]) -> Iterator[tuple[str, set[str]]]:
    """Each name that a query may use, with its labels."""
    for family in metrics.values():
        labels = set(labels_of(family))
        if family.type == "histogram":
            yield f"{family.name}_bucket", labels | {"le"}
            yield f"{family.name}_sum", labels
            yield f"{family.name}_count", labels
        else:
            yield exported_name(family), labels


def rows(metrics: dict[str, Metric]) -> list[str]:
    """The table of docs/monitoring.md: a row for each family."""
    return [
        f"| `{exported_name(family)}` | {family.type} | {', '.join(f'`{each}`' for each in labels_of(family))} |"
        f" {family.documentation} |"
        for family in metrics.values()
    ]
