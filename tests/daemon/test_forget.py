"""`forget` at a real daemon: what was removed is out of memory and off the disk, and stays so over a restart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvcached.cli.main import ExitCode, main
from kvcached_client import Admin
from kvcached_client.types import MissReason
from tests.daemon.conftest import RunningDaemon, started
from tests.daemon.offload_process import BLOCK_SIZE, keys_of
from tests.daemon.supervised import supervised
from tests.daemon.test_restart import Engine
from tests.daemon.test_storage import BLOCKS, connected, fetch, report, until, with_storage


def forget(run_dir: Path, name: str, from_block: int = 0) -> Result:
    """Remove a prompt from the only namespace."""
    keys = keys_of(name, BLOCKS)
    lines = "\n".join(keys[at : at + 16].hex() for at in range(0, len(keys), 16))
    with Admin.connect(run_dir, deadline_ms=10_000) as admin:
        (host,) = admin.stats().hosts
    options = ["--run-dir", str(run_dir), "--from-block", str(from_block), "--json"]
    return CliRunner().invoke(main, ["forget", host.namespace, "--keys", "-", *options], input=lines)


def said(result: Result) -> tuple[int, int, int, int, str]:
    """The exit code, and what JSON says."""
    told = json.loads(result.stdout)
    return result.exit_code, told["host"], told["stored"], told["in_use"], told["left_in_storage"]


def blocks_of(daemon: RunningDaemon) -> int:
    return report(daemon).blocks


def at_rest(run_dir: Path, backed_up: int) -> bool:
    """Whether so many blocks were written to storage, no lease is held, and no copy is under way."""
    with Admin.connect(run_dir, deadline_ms=10_000) as admin:
        stats = admin.stats()
    is_held = any(stats.transfers.values()) or any(host.leases for host in stats.hosts)
    return stats.counters.get("backed_up_blocks", 0) == backed_up and not is_held


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_removed_prompt_is_off_the_disk(tmp_path: Path, *, is_encrypted: bool) -> None:
    """Only what is to stay of it is left in memory and on the disk, also if memory has lost it; others are whole."""
    key = tmp_path / "one.key"
    if is_encrypted:
        pytest.importorskip("cryptography")
        key.write_bytes(bytes(range(32)))
        key.chmod(0o600)
    text = with_storage(tmp_path / "disk", more=f'key_file = "{key}"' if is_encrypted else "")
    with started(tmp_path, text) as daemon, connected(daemon) as engine:
        for name in ("a", "b", "c"):
            engine.store(name, BLOCKS)
        until(lambda: at_rest(daemon.run_dir, 3 * BLOCKS))
        assert said(forget(daemon.run_dir, "a", 2)) == (ExitCode.OK, BLOCKS - 2, BLOCKS - 2, 0, "")
        assert (blocks_of(daemon), engine.scheduler.hit("a", BLOCKS)) == (2 * BLOCKS + 2, 2)
        with Admin.connect(daemon.run_dir, deadline_ms=10_000) as admin:
            (told,) = admin.explain(keys_of("a", BLOCKS), BLOCKS * BLOCK_SIZE, full=True)
            assert (told.hit, told.reason) == (2, MissReason.FORGOTTEN)
            assert admin.check().violations == ()
    with started(tmp_path, text) as daemon, connected(daemon) as engine:  # memory is empty
        assert said(forget(daemon.run_dir, "b")) == (ExitCode.OK, 0, BLOCKS, 0, "")
        assert [fetch(engine, name).fetched for name in ("a", "b", "c")] == [2, 0, BLOCKS]


def test_prompt_in_use_is_removed_by_the_next_command(tmp_path: Path) -> None:
    """A lease keeps what it holds, in memory and on the disk; the request reads it, and afterwards it goes."""
    with started(tmp_path, with_storage(tmp_path / "disk")) as daemon, connected(daemon) as engine:
        engine.store("a", BLOCKS)
        until(lambda: at_rest(daemon.run_dir, BLOCKS))
        client = engine.scheduler.client
        held = client.acquire("running", keys_of("a", BLOCKS), BLOCKS * BLOCK_SIZE, full=True)
        assert said(forget(daemon.run_dir, "a")) == (ExitCode.UNHEALTHY, 0, 0, BLOCKS, "")
        assert (blocks_of(daemon), held.hit) == (BLOCKS, BLOCKS)
        assert engine.load("a", BLOCKS) == BLOCKS
        client.release(held.lease)
        until(lambda: at_rest(daemon.run_dir, BLOCKS))
        assert said(forget(daemon.run_dir, "a")) == (ExitCode.OK, BLOCKS, BLOCKS, 0, "")
        assert (blocks_of(daemon), engine.load("a", BLOCKS)) == (0, 0)
        engine.store("a", BLOCKS)  # it may come again, and is written again
        until(lambda: at_rest(daemon.run_dir, 2 * BLOCKS))


def test_removed_prompt_does_not_come_back_with_the_next_daemon(tmp_path: Path) -> None:
    """After a SIGKILL, nothing of it is found in the host pool that was kept, nor in storage; another prompt is."""
    with supervised(tmp_path, with_storage(tmp_path / "disk")) as daemon:
        running = RunningDaemon(daemon.process, daemon.run_dir)
        engine = Engine(daemon.run_dir)
        engine.store("a", BLOCKS)
        engine.store("b", BLOCKS)
        until(lambda: at_rest(daemon.run_dir, 2 * BLOCKS))
        assert said(forget(daemon.run_dir, "a", 1)) == (ExitCode.OK, BLOCKS - 1, BLOCKS - 1, 0, "")
        daemon.kill_and_wait()
        engine.connect()
        engine.join()
        assert (engine.load("a", BLOCKS), engine.load("b", BLOCKS)) == (1, BLOCKS)
        until(lambda: report(running).state == "ready")
        assert fetch(engine, "a").fetched == 0
        engine.close()


def test_storage_that_fails_is_told(tmp_path: Path) -> None:
    """Memory is without the prompt; the command says that storage may have it, and exits with 1."""
    text = with_storage(tmp_path / "disk")
    with started(tmp_path, text) as daemon, connected(daemon) as engine:
        engine.store("a", BLOCKS)
        until(lambda: at_rest(daemon.run_dir, BLOCKS))
        with Admin.connect(daemon.run_dir, deadline_ms=10_000) as admin:
            admin.storage("detach")
        assert said(forget(daemon.run_dir, "a")) == (ExitCode.UNHEALTHY, BLOCKS, 0, 0, "it is detached")
        with Admin.connect(daemon.run_dir, deadline_ms=10_000) as admin:
            admin.storage("attach")
        until(lambda: report(daemon).state == "ready")
        assert said(forget(daemon.run_dir, "a")) == (ExitCode.OK, 0, BLOCKS, 0, "")
