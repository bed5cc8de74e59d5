"""The record of generations is lost: nothing that another daemon may have cleared is served, and nothing else goes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcached.config.schema import Config, load_config
from kvcached.core.generations import Edition
from kvcached.core.messages import StorageLost, StorageReady
from kvcached.storage.backend import Usage
from kvcached.storage_start import RecordReader
from tests.service.office import FakePeer, Office, key_chain
from tests.service.test_clears import busy, clear, cleared
from tests.service.test_followed_clears import LATER, Engines, generation_of, of_replicas
from tests.service.test_recorder import with_storage

CONFIG = """
[offload]
[host]
size_bytes = "64MiB"
[storage]
[storage.settings]
directory = "{directory}"
capacity_bytes = "8MiB"
"""


def configured(folder: Path) -> Config:
    """With storage in a directory that has no record."""
    path = folder / "kvcached.toml"
    path.write_text(CONFIG.format(directory=folder / "disk"))
    (folder / "disk").mkdir()
    return load_config(path, environment={})


async def opened(config: Config, engines: Engines, blocks: int) -> None:
    """Storage is locked for this daemon, and says how many blocks it has."""
    link: Any = SimpleNamespace(usage=Usage(blocks, -1, -1))
    over = asyncio.Event()
    RecordReader(config, engines.office.service, link).begin(over.set)
    await over.wait()


@pytest.mark.parametrize(
    ("damage", "blocks", "is_cleared"),
    [("removed", 3, True), ("damaged", 3, True), ("removed", -1, True), ("removed", 0, False)],
    ids=["removed", "damaged", "of storage of unknown size", "of empty storage"],
)
def test_daemon_that_waited_for_storage_serves_nothing_without_its_record(
    tmp_path: Path, damage: str, blocks: int, is_cleared: bool
) -> None:
    """It begins generations that no daemon ever had, unless storage is empty, so that nothing can come back from it."""
    engines, config = Engines(), configured(tmp_path)
    before = engines.generation()
    engines.office.service.on_event(StorageLost())
    if damage == "damaged":
        (tmp_path / "disk" / "generations.json").write_bytes(bytes(64))
    asyncio.run(opened(config, engines, blocks))

    assert (engines.generation() > before, engines.office.hit(3)) == (is_cleared, 0 if is_cleared else 3)


def test_generation_that_only_this_daemon_knows_stays() -> None:
    """It began while another daemon had storage, which has no block of it: what memory has since is kept."""
    engines = Engines()
    engines.office.service.on_event(StorageLost())
    engines.office.cache.offload.namespaces.clear(engines.office.cache.offload.namespaces.by_root[engines.root])
    generation = engines.generation()
    engines.office.service.clears.lose_record()

    assert engines.generation() == generation


def test_write_that_failed_may_have_been_read_by_another_daemon() -> None:
    """The file may be replaced though its write was reported as failed: the generation in it is not gone on with."""
    engines = Engines()
    engines.office.cache.offload.namespaces.clear(engines.office.cache.offload.namespaces.by_root[engines.root])
    engines.office.service.state_writer.recorder.keep()
    engines.writer.end("the directory cannot be synced")
    engines.office.service.on_event(StorageLost())
    generation = engines.generation()
    engines.office.service.clears.lose_record()

    assert engines.generation() > generation


def test_replicas_are_cleared_and_keep_their_weights() -> None:
    """The other daemon's weights are not known; those of this one hold, in a generation that was never stored."""
    office = Office("a")
    clear(office)
    with_storage(office)
    office.service.clears.follow(of_replicas(LATER, "step 9"))
    office.service.on_event(StorageReady())
    office.enter(FakePeer(1))
    office.store(key_chain(3))
    office.service.on_event(StorageLost())
    office.service.clears.lose_record()
    office.service.on_event(StorageReady())

    generation, weights = generation_of(office)
    assert (generation > LATER, weights) == (True, "step 9")


def test_clear_under_way_ends_in_a_generation_that_no_record_had() -> None:
    """A clear that follows another daemon's is in its generation no more, which that one may have cleared since."""
    office = busy()
    with_storage(office)
    answers = clear(office)
    office.service.clears.follow(of_replicas(LATER))
    office.service.on_event(StorageLost())
    office.service.clears.lose_record()
    office.service.on_event(StorageReady())
    office.workers["a"].end_all()

    generation, _ = generation_of(office)
    assert generation > LATER
    assert not answers or cleared(answers)[0] == generation


def test_namespaces_that_nobody_uses_begin_anew_too() -> None:
    """An engine that declares its namespace again gets another generation than the one in the record that was lost."""
    engines = Engines()
    other = b"o" * 32
    engines.office.service.clears.follow({other: Edition(LATER)})
    engines.office.service.on_event(StorageReady())
    engines.office.service.clears.lose_record()

    assert engines.office.cache.generations.of(other) > LATER
