"""A disk of each machine in front of a Valkey server that they share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

from kvcached.storage.link_state import LinkState
from kvcached_client import Admin
from kvcached_client.types import KEY_SIZE_BYTES
from tests.daemon.offload_process import keys_of
from tests.daemon.test_generations import reboot
from tests.daemon.test_shared_storage import TIMEOUT_MS, machine, shared, with_backend
from tests.daemon.test_storage import BLOCKS, report, until
from tests.storage.redis.servers import Server

pytestmark = [pytest.mark.slow, pytest.mark.end_to_end]


@pytest.fixture
def server() -> Iterator[Server]:
    with closing(Server()) as server:
        yield server


def with_disk(server: Server, directory: Path) -> str:
    directory.parent.mkdir(exist_ok=True)
    settings = f'directory = "{directory}"\ncapacity_bytes = "64MiB"\nfree_space_floor_bytes = 0'
    return shared(server) + f"\n[storage.local_disk]\n{settings}\n"


def on_disk(directory: Path, *names: str) -> int:
    """How many blocks of these prompts a local disk has: each begins with its key."""
    files = b"".join(path.read_bytes() for path in directory.glob("*.slots"))
    keys = b"".join(keys_of(name, BLOCKS) for name in names)
    return sum(keys[at : at + KEY_SIZE_BYTES] in files for at in range(0, len(keys), KEY_SIZE_BYTES))


def test_blocks_are_found_on_the_disk_while_the_service_is_away(tmp_path: Path, server: Server) -> None:
    """Those that this machine has computed, and those that came from another one through the service."""
    disk = tmp_path / "two" / "disk"
    with machine(tmp_path / "one", shared(server)) as one:
        one.store("a")
    with machine(tmp_path / "two", with_disk(server, disk)) as two:
        two.store("b")
        assert two.found("a") == BLOCKS
        until(lambda: on_disk(disk, "a", "b") == 2 * BLOCKS)
    with machine(tmp_path / "two", with_disk(server, disk)) as two:
        with server.stopped():
            assert two.engine.load("a", BLOCKS) == 0
            assert (two.found("a"), two.found("b")) == (BLOCKS, BLOCKS)
            told = report(two.daemon).local_disk
            assert told is not None
            assert (told.blocks, told.capacity_bytes, told.read_blocks) == (2 * BLOCKS, 64 << 20, 2 * BLOCKS)
            two.engine.store("c", BLOCKS)
            until(lambda: on_disk(disk, "c") == BLOCKS)
            assert report(two.daemon).state == LinkState.READY
        assert two.found("b") == BLOCKS


def test_clear_deletes_on_the_disk_and_in_the_service(tmp_path: Path, server: Server) -> None:
    """What another machine clears, too; a disk whose daemon was not running is asked in the new generation."""
    disks = [tmp_path / name / "disk" for name in ("one", "two")]
    texts = [with_disk(server, disk) for disk in disks]
    with machine(tmp_path / "one", texts[0]) as one:
        with machine(tmp_path / "two", texts[1]) as two:
            one.store("a")
            assert two.found("a") == BLOCKS
            until(lambda: on_disk(disks[1], "a") == BLOCKS)
            with Admin.connect(one.daemon.run_dir, deadline_ms=10_000) as admin:
                admin.clear("tiny")
            until(lambda: two.engine.scheduler.hit("a", BLOCKS) == 0)
            until(lambda: not any(on_disk(disk, "a") for disk in disks))
            assert (one.found("a"), two.found("a")) == (0, 0)
            two.store("b")
        with Admin.connect(one.daemon.run_dir, deadline_ms=10_000) as admin:
            admin.clear("tiny")
    with machine(tmp_path / "two", texts[1]) as two:
        assert on_disk(disks[1], "b") == BLOCKS
        assert two.found("b") == 0


def test_clear_that_a_service_has_lost_holds_on_the_disk_of_a_machine_that_missed_it(
    tmp_path: Path, server: Server
) -> None:
    """A server without persistence is restarted: nobody can tell this machine what was cleared while it was away."""
    disk = tmp_path / "two" / "disk"
    with machine(tmp_path / "one", shared(server)) as one:
        with machine(tmp_path / "two", with_disk(server, disk)) as two:
            two.store("b")
            assert one.found("b") == BLOCKS
        with Admin.connect(one.daemon.run_dir, deadline_ms=10_000) as admin:
            admin.clear("tiny")
    server.kill()
    server.start()
    with machine(tmp_path / "two", with_disk(server, disk)) as two:
        assert two.found("b") == 0


def test_disk_that_served_alone_before_and_does_so_again_forgets_what_it_knew(tmp_path: Path, server: Server) -> None:
    """Its own record of generations knows nothing of what was cleared in the service meanwhile."""
    disk = tmp_path / "two" / "disk"
    disk.parent.mkdir()
    settings = f'directory = "{disk}"\ncapacity_bytes = "64MiB"\nfree_space_floor_bytes = 0'
    alone = with_backend("disk", settings)
    with machine(tmp_path / "two", alone) as two:
        two.store("b")
    with machine(tmp_path / "one", shared(server)) as one:
        one.store("a")
        with machine(tmp_path / "two", with_disk(server, disk)) as two:
            assert two.found("a") == BLOCKS
            with Admin.connect(one.daemon.run_dir, deadline_ms=10_000) as admin:
                admin.clear("tiny")
            until(lambda: two.engine.scheduler.hit("a", BLOCKS) == 0)
    assert on_disk(disk, "b") == BLOCKS
    reboot(tmp_path / "two")
    with machine(tmp_path / "two", alone) as two:
        assert two.found("b") == 0


def test_service_that_hangs_keeps_nobody_waiting_for_long(tmp_path: Path, server: Server) -> None:
    """Of a service that does not answer, a call each few seconds waits for its limit; the others go by it."""
    assert TIMEOUT_MS == 500
    disk = tmp_path / "one" / "disk"
    with machine(tmp_path / "one", with_disk(server, disk)) as one:
        with server.stopped():
            names = [f"prompt {number}" for number in range(8)]
            for name in names:
                one.store(name)
            assert on_disk(disk, *names) == 8 * BLOCKS
        later = count()

        def is_shared() -> bool:
            one.store(f"later {next(later)}")
            return int(server.ask("DBSIZE")) >= BLOCKS

        until(is_shared)
