"""Daemons of several machines that share a Valkey server: each has a run directory and memory of its own."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import redis

from kvcached.storage.link_state import LinkState
from kvcached_client import Admin
from kvcached_client.errors import RequestError
from tests.daemon.conftest import RunningDaemon, started
from tests.daemon.supervised import supervised
from tests.daemon.test_generations import reboot
from tests.daemon.test_offload import config
from tests.daemon.test_restart import Engine
from tests.daemon.test_storage import BLOCKS, connected, fetch, report, until
from tests.storage.redis.servers import Server
from tests.storage.s3.servers import server as bucket_server

pytestmark = [pytest.mark.slow, pytest.mark.end_to_end]

#: Calls of the tests take at most this long where the server does not answer.
TIMEOUT_MS = 500


@pytest.fixture
def server() -> Iterator[Server]:
    with closing(Server()) as server:
        yield server


def with_backend(backend: str, settings: str, more: str = "") -> str:
    return (
        config()
        + f'\n[storage]\nbackend = "{backend}"\nprefetch_threshold_blocks = 1\n{more}\n'
        + f"[storage.settings]\n{settings}\n"
    )


def shared(server: Server, more: str = "") -> str:
    return with_backend("redis", f'url = "{server.url}"', f"timeout_ms = {TIMEOUT_MS}\n{more}")


def in_bucket(directory: Path) -> str:
    settings = bucket_server().settings(directory)
    return with_backend("s3", "\n".join(f"{key} = {_toml(value)}" for key, value in settings.items()))


def _toml(value: object) -> str:
    return f"{value}" if isinstance(value, int) else f'"{value}"'


class Machine:
    """A daemon with an engine."""

    def __init__(self, daemon: RunningDaemon, engine: Engine) -> None:
        self.daemon, self.engine = daemon, engine

    def store(self, name: str) -> None:
        """A prompt's blocks, in memory and in storage."""
        before = self._written()
        self.engine.store(name, BLOCKS)
        until(lambda: self._written() >= before + BLOCKS)

    def _written(self) -> int:
        return report(self.daemon).counters.get("written_blocks", 0)

    def found(self, name: str) -> int:
        """How many blocks of a prompt are in storage or in memory. Their bytes are right: the engine compares them."""
        fetch(self.engine, name)
        return self.engine.load(name, BLOCKS)


@contextmanager
def machine(directory: Path, text: str) -> Iterator[Machine]:
    """A machine with its daemon, ready."""
    directory.mkdir(exist_ok=True)
    with ExitStack() as parts:
        daemon = parts.enter_context(started(directory, text))
        yield Machine(daemon, parts.enter_context(connected(daemon)))


def test_what_one_machine_computes_all_others_find(tmp_path: Path, server: Server) -> None:
    """Byte for byte, on a machine that was there and on one that comes later, and after all of them are gone."""
    text = shared(server)
    with machine(tmp_path / "one", text) as one, machine(tmp_path / "two", text) as two:
        one.store("a")
        assert two.found("a") == BLOCKS
        two.store("b")
        with machine(tmp_path / "three", text) as three:
            assert (three.found("a"), three.found("b")) == (BLOCKS, BLOCKS)
    with machine(tmp_path / "four", text) as four:
        assert four.found("b") == BLOCKS


@pytest.mark.parametrize("backend", ["redis", "s3"])
def test_clear_on_one_machine_reaches_memory_and_storage_of_all(tmp_path: Path, server: Server, backend: str) -> None:
    """What was stored before is found on no machine, and what is stored since is found on all."""
    text = shared(server) if backend == "redis" else in_bucket(tmp_path)
    with machine(tmp_path / "one", text) as one, machine(tmp_path / "two", text) as two:
        one.store("a")
        assert two.found("a") == BLOCKS
        with Admin.connect(one.daemon.run_dir, deadline_ms=10_000) as admin:
            assert admin.clear("tiny").blocks == BLOCKS
        until(lambda: two.engine.scheduler.hit("a", BLOCKS) == 0)
        assert (two.found("a"), one.found("a")) == (0, 0)
        two.store("a")
        assert one.found("a") == BLOCKS


def test_clear_holds_though_its_machine_is_lost_right_after_it(tmp_path: Path, server: Server) -> None:
    """The service has recorded what was answered: neither the next daemon there nor another machine finds a block."""
    text = shared(server)
    with machine(tmp_path / "one", text) as one:
        one.store("a")
        with Admin.connect(one.daemon.run_dir, deadline_ms=10_000) as admin:
            admin.clear("tiny")
        one.daemon.process.send_signal(signal.SIGKILL)
        one.daemon.process.wait()
    reboot(tmp_path / "one")
    with machine(tmp_path / "one", text) as one, machine(tmp_path / "two", text) as two:
        assert (one.found("a"), two.found("a")) == (0, 0)
        until(lambda: report(one.daemon).counters["forgets_due"] + report(two.daemon).counters["forgets_due"] == 0)
        assert server.ask("DBSIZE") == 1  # the record


@pytest.mark.parametrize("is_busy", [False, True], ids=["nobody writes", "an engine stores at once"])
def test_service_that_lost_everything_is_filled_again(tmp_path: Path, server: Server, *, is_busy: bool) -> None:
    """A server without persistence is restarted: both daemons stay in their generation, and share what they write."""
    text = shared(server)
    with machine(tmp_path / "one", text) as one, machine(tmp_path / "two", text) as two:
        one.store("a")
        assert two.found("a") == BLOCKS
        server.kill()
        server.start()
        if not is_busy:
            until(lambda: server.ask("DBSIZE") > 0)  # the record, at least
        one.store("b")
        until(lambda: bool(server.ask("EXISTS", "kvcached:record")))
        assert two.found("b") == BLOCKS
        assert (one.engine.load("a", BLOCKS), two.engine.load("a", BLOCKS)) == (BLOCKS, BLOCKS)


def test_service_that_hangs_costs_hits_only(tmp_path: Path, server: Server) -> None:
    """Requests go on from memory; a clear is an error and holds here; all of it is shared when the service is back."""
    text = shared(server)
    with machine(tmp_path / "one", text) as one, machine(tmp_path / "two", text) as two:
        one.store("a")
        assert two.found("a") == BLOCKS
        with server.stopped():
            assert one.engine.load("a", BLOCKS) == BLOCKS
            with (
                Admin.connect(one.daemon.run_dir, deadline_ms=20_000) as admin,
                pytest.raises(RequestError, match="the namespace is cleared, but"),
            ):
                admin.clear("tiny")
            assert one.engine.load("a", BLOCKS) == 0
            assert two.engine.load("a", BLOCKS) == BLOCKS
        until(lambda: two.engine.scheduler.hit("a", BLOCKS) == 0)
        assert (one.found("a"), two.found("a")) == (0, 0)


def test_daemon_starts_without_its_service_and_joins_it_later(tmp_path: Path, server: Server) -> None:
    """Its namespace takes the generation of the others, who keep what they have."""
    text = shared(server)
    with machine(tmp_path / "one", text) as one:
        one.store("a")
        with server.stopped(), machine(tmp_path / "two", text) as two:
            server._process.send_signal(signal.SIGCONT)
            until(lambda: report(two.daemon).state == LinkState.READY)
            assert two.found("a") == BLOCKS
            assert one.engine.load("a", BLOCKS) == BLOCKS


def test_machine_that_joins_or_comes_back_clears_nobody(tmp_path: Path, server: Server) -> None:
    """It had a generation of its own while it had other storage, or missed a clear: it takes the recorded one."""
    text = shared(server)
    with machine(tmp_path / "one", text) as one:
        with machine(tmp_path / "two", config()) as two:
            two.engine.store("b", BLOCKS)
        one.store("a")
        with machine(tmp_path / "two", text) as two:
            assert (two.found("a"), two.found("b")) == (BLOCKS, 0)
        assert one.engine.load("a", BLOCKS) == BLOCKS
        with Admin.connect(one.daemon.run_dir, deadline_ms=10_000) as admin:
            admin.clear("tiny")
        one.store("c")
        with machine(tmp_path / "two", text) as two:
            assert (two.found("a"), two.found("c")) == (0, BLOCKS)
        assert one.engine.load("c", BLOCKS) == BLOCKS


def test_daemons_of_another_layout_or_key_do_not_use_the_service(tmp_path: Path, server: Server) -> None:
    """They would read nothing of it and spoil the record: they say why, and the others go on."""
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_bytes(bytes(32))
    with machine(tmp_path / "one", shared(server)) as one:
        one.store("a")
        for name, more, why in (
            ("canonical", 'layout = "canonical"', "the same [storage] layout"),
            ("encrypted", f'key_file = "{key}"', "the same key_file"),
        ):
            with machine(tmp_path / name, shared(server, more)) as other:
                told = report(other.daemon)
                assert told.state != LinkState.READY
                assert why in told.why
        one.store("b")


def test_service_that_refuses_the_next_daemon_costs_no_memory(tmp_path: Path, server: Server) -> None:
    """A daemon is killed after the server's password was changed: the next one hits in memory, says why, tries on."""
    operator = redis.Redis(unix_socket_path=str(server.socket), protocol=2, single_connection_client=True)
    with closing(operator), supervised(tmp_path, shared(server)) as daemon:
        with closing(Engine(daemon.run_dir)) as engine:
            engine.store("a", BLOCKS)
            operator.config_set("requirepass", "another")
            daemon.kill_and_wait()
            engine.connect()
            engine.join()
            assert engine.load("a", BLOCKS) == BLOCKS
        with Admin.connect(daemon.run_dir, deadline_ms=10_000) as admin:
            (detail,) = [each.detail for each in admin.health().parts if each.part == "storage"]
            assert "refuses the user" in detail
            operator.config_set("requirepass", "")
            until(lambda: admin.storage("status").state == LinkState.READY)


@pytest.mark.parametrize("change", ["key", "layout"])
def test_storage_of_another_key_or_layout_is_cleared_and_used(tmp_path: Path, server: Server, change: str) -> None:
    """After the change, storage waits; `kvcached storage clear` on one machine is enough for all, and old blocks go."""
    settings = {"key": [], "layout": ["", 'layout = "canonical"']}[change]
    for name in ("first", "second") if change == "key" else ():
        path = tmp_path / name
        path.touch(mode=0o600)
        path.write_bytes(name.ljust(32).encode())
        settings.append(f'key_file = "{path}"')
    before, after = (shared(server, each) for each in settings)
    with machine(tmp_path / "one", before) as one:
        one.store("a")
    with machine(tmp_path / "one", after) as one, machine(tmp_path / "two", after) as two:
        assert report(one.daemon).state != LinkState.READY
        assert "kvcached storage clear replaces it" in report(two.daemon).why

        with Admin.connect(one.daemon.run_dir, deadline_ms=20_000) as admin:
            assert admin.storage("clear").state == LinkState.READY

        assert server.ask("KEYS", "kvcached:b:*") == []
        until(lambda: report(two.daemon).state == LinkState.READY)
        one.store("b")
        assert (two.found("b"), two.found("a")) == (BLOCKS, 0)
    with machine(tmp_path / "three", after) as three:
        assert three.found("b") == BLOCKS


@pytest.mark.parametrize("kind", ["string", "too large"])
def test_what_is_no_record_is_replaced_by_a_clear(tmp_path: Path, server: Server, kind: str) -> None:
    """Whatever is in its place: storage waits, says how to go on, and that works."""
    if kind == "string":
        server.ask("SET", "kvcached:record", "x")
    else:
        server.ask("HSET", "kvcached:record", "version", "v", "data", "x" * (5 << 20))
    with machine(tmp_path / "one", shared(server)) as one:
        assert "kvcached storage clear replaces it" in report(one.daemon).why
        with Admin.connect(one.daemon.run_dir, deadline_ms=20_000) as admin:
            assert admin.storage("clear").state == LinkState.READY
        one.store("a")
        assert one.found("a") == BLOCKS
    assert server.ask("TYPE", "kvcached:record") == b"hash"
