"""The index as the status page draws it: ``/tree.json``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec

from kvcached.core.insight.picture import ShownRun, TreePicture
from kvcached.service.report_verbs import ReportVerbs


class TreeRun(msgspec.Struct, frozen=True):
    """A run of blocks."""

    above: int  #: place of the run that it continues; -1 for the first run of a chain
    name: str  #: of its first block, as `kvcached tree` shows it; not its key
    start: int
    blocks: int
    held: dict[str, int]
    pins: int
    children: int
    below: int
    idle: int


class DrawnTree(msgspec.Struct, frozen=True):
    """The tree of a namespace. For what a field means, see `kvcached.core.insight.picture`."""

    namespace: str
    label: str
    replicas: tuple[str, ...]
    pools: tuple[str, ...]  #: names that `held` may have, device pools first
    runs: int
    chains: int
    looked: int
    blocks: int
    shown: list[TreeRun]


async def tree_json(reports: ReportVerbs) -> bytes:
    """A picture of the index as it is now. Requests of engines go between two steps of it."""
    for pictures in reports.draw():
        if pictures is not None:
            return msgspec.json.encode({"trees": list(_drawn(reports, pictures))}) + b"\n"
        await asyncio.sleep(0)
    raise RuntimeError("a picture of the index ends with the picture")


def _drawn(reports: ReportVerbs, pictures: list[TreePicture]) -> Iterator[DrawnTree]:
    for picture in pictures:
        tree = picture.tree
        namespace, label = reports.names_of(tree)
        replicas = tuple(pool.name for pool in tree.pools)
        yield DrawnTree(
            namespace=namespace,
            label=label,
            replicas=replicas,
            pools=(*replicas, *([] if tree.host is None else [tree.host.name])),
            runs=tree.run_count,
            chains=picture.chains,
            looked=picture.looked,
            blocks=picture.blocks,
            shown=[_run(reports, run) for run in picture.shown],
        )


def _run(reports: ReportVerbs, run: ShownRun) -> TreeRun:
    return TreeRun(
        above=run.above,
        name=reports.shown.name_of(run.key).hex(),
        start=run.start,
        blocks=run.blocks,
        held=run.held,
        pins=run.pins,
        children=run.children,
        below=run.below,
        idle=run.idle,
    )
