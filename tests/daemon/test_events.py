"""Routers that are killed, late and stalled, beside real daemons that are killed, too."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcached_client import Admin, Client, Lease
from kvcached_client.protocol.zmtp import GREETING, SUBSCRIBER, subscribe
from tests.daemon.conftest import CONFIG, started
from tests.daemon.supervised import Supervised, supervised
from tests.daemon.test_kill_loop import BLOCKS, Engine
from tests.events.router import Router, Tier
from tests.project.daemon_process import clean_environment
from tests.project.source_tree import ROOT

SLOTS = 64
EVENTS = "[events]\nbuffer_bytes = 65536\nblock_hashes = 'bytes'\n[[events.namespace]]\nlabel = '*'\ntoken_ids = true\n"
HOST = f"{EVENTS}[host]\nsize_bytes = 4194304\nslab_bytes = 262144\n"
EVENTS_CONFIG = HOST + CONFIG.replace("slots = 16", f"slots = {SLOTS}").replace(
    "heartbeat_interval_ms = 100\nsession_ttl_ms = 600\n", ""
)
ROUNDS = 12
QUIET_MS = 300


class RouterProcess:
    """A router in a process of its own, which prints its index when it is asked."""

    def __init__(self, run_dir: Path) -> None:
        arguments = [sys.executable, "-m", "tests.daemon.router_process", str(run_dir)]
        self.process = subprocess.Popen(
            arguments, cwd=ROOT, env=clean_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def index(self) -> tuple[dict[Tier, dict[bytes, list[int]]], dict[str, int]]:
        """What it knows once it hears nothing more, with the tokens of blocks, and what it has been through."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("?\n")
        self.process.stdin.flush()
        tiers, seen = json.loads(self.process.stdout.readline())
        return {(name, rank): {bytes.fromhex(key): told for key, told in blocks} for name, rank, blocks in tiers}, seen

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def daemon_config() -> str:
    """With events, whose keys come first."""
    head, _, rest = EVENTS_CONFIG.partition("[[replica]]")
    return f"{head}[[replica]]{rest}"


def right_index(run_dir: Path, keys: set[bytes]) -> dict[Tier, set[bytes]]:
    """Where each of these blocks is, as the daemon says one by one."""
    index: dict[Tier, set[bytes]] = {}
    with Admin.connect(run_dir, deadline_ms=20_000) as admin:
        assert admin.check().violations == ()
        namespace = admin.describe().replicas[0].namespace
        for key in keys:
            for place in admin.inspect(key).places:
                if place.state == "cached":
                    index.setdefault((namespace, None if place.tier == "host" else 0), set()).add(key)
    return index


def serve(engine: Engine, chance: random.Random, requests: int, tokens: dict[bytes, list[int]]) -> None:
    """Prompts of long ago and new ones, in a pool and a host pool that hold a part of them; notes their blocks."""
    for _ in range(requests):
        number = chance.randrange(60)
        chain = engine.chain(number)
        for depth in range(BLOCKS):
            told = chain.token_range(depth, depth + 1)
            assert told is not None
            tokens[chain.key_range(depth, depth + 1)] = array("i", told).tolist()
        engine.compute(number)


@pytest.mark.timeout(300)
def test_routers_are_exact_whoever_is_killed(tmp_path: Path, daemon_config: str) -> None:
    """Routers that are killed and started at random, under load, eviction and kills of the daemon, hold its index.

    They know the tokens of every block, also of those that a daemon has taken over.
    """
    chance, keys = random.Random(3), dict[bytes, list[int]]()
    with supervised(tmp_path, daemon_config, pause_min_s=0.01, pause_max_s=0.01) as daemon:
        engine = Engine(daemon.run_dir, Counter())
        routers = [RouterProcess(daemon.run_dir) for _ in range(3)]
        seen: Counter[str] = Counter()
        try:
            for number in range(ROUNDS):
                serve(engine, chance, 20, keys)
                place = chance.randrange(len(routers))
                if chance.randrange(2):
                    routers[place].kill()
                serve(engine, chance, 10, keys)
                if routers[place].process.poll() is not None:
                    routers[place] = RouterProcess(daemon.run_dir)
                if number % 4 == 3:
                    engine = kill_daemon(daemon, engine)
                serve(engine, chance, 10, keys)
                with Admin.connect(daemon.run_dir, deadline_ms=20_000) as admin:
                    assert admin.pause(deadline_ms=10_000).under_way == 0
                right = right_index(daemon.run_dir, set(keys))
                for router in routers:
                    index, events = router.index()
                    assert index.keys() == right.keys()
                    assert {tier: index[tier].keys() ^ right[tier] for tier in right} == {tier: set() for tier in right}
                    assert all(told == keys[key] for blocks in index.values() for key, told in blocks.items())
                    seen.update(events)
                with Admin.connect(daemon.run_dir, deadline_ms=20_000) as admin:
                    admin.resume()
        finally:
            engine.parts.close()
            for router in routers:
                router.kill()
    assert seen["snapshots"] > ROUNDS
    assert seen["gaps"] > seen["snapshots"] / 2


def kill_daemon(daemon: Supervised, engine: Engine) -> Engine:
    """The next daemon has the blocks of the last one; so has the next engine."""
    daemon.kill()
    engine.parts.close()
    daemon.await_ready()
    return Engine(daemon.run_dir, Counter())


@pytest.fixture
def running(tmp_path: Path, daemon_config: str) -> Iterator[Path]:
    """The run directory of a daemon with events."""
    with started(tmp_path, daemon_config) as daemon:
        yield daemon.run_dir


def store(client: Client, number: int) -> Lease:
    with client.acquire(f"r{number}", client.chain(range(number * 100, number * 100 + 16))) as lease:
        lease.finish(computed_tokens=16)
    return lease


def test_stalled_subscribers_delay_nobody(running: Path) -> None:
    """Subscribers that never read do not keep requests from being answered, nor another subscriber from its events."""
    router = Router.of(running)
    stalled = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    try:
        for each in stalled:
            each.connect(str(running / "events.sock"))
            each.sendall(GREETING + SUBSCRIBER.ready + subscribe(b""))
        with Client.connect(running) as client:
            for number in range(400):
                store(client, number)
        while router.take(QUIET_MS):
            pass
        assert sum(map(len, router.solid().values())) > SLOTS
    finally:
        router.close()
        for each in stalled:
            each.close()


def test_clear_is_told(running: Path) -> None:
    """`kvcached clear` and new weights are told for each tier: nothing of it is there any more."""
    router = Router.of(running)
    with Client.connect(running) as client:
        store(client, 1)
        while router.take(QUIET_MS):
            pass
        assert len(router.solid()) == 2
        with Admin.connect(running, deadline_ms=20_000) as admin:
            admin.set_weights("default", "v2")
        while router.take(QUIET_MS):
            pass
        assert router.solid() == {}
    router.close()


def test_command_prints_a_line_per_event(running: Path) -> None:
    """`kvcached events` prints each event as it comes, with --json as a JSON object, and ends with the daemon."""
    arguments = [sys.executable, "-m", "kvcached", "events", "--run-dir", str(running), "--json"]
    with subprocess.Popen(arguments, cwd=ROOT, env=clean_environment(), stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        with Client.connect(running) as client:
            store(client, 1)
            lines = [json.loads(command.stdout.readline())]
            store(client, 2)
            while len(lines) < 2 or lines[-1]["medium"] != "CPU":
                lines.append(json.loads(command.stdout.readline()))
        command.send_signal(signal.SIGINT)
    assert {line["type"] for line in lines} == {"BlockStored"}
    assert all(len(line["block_hashes"][0]) == 32 for line in lines)


def test_command_says_where_events_are_configured(tmp_path: Path) -> None:
    """Without events, `kvcached events` ends with 4 and names the table."""
    with started(tmp_path) as daemon:
        arguments = [sys.executable, "-m", "kvcached", "events", "--run-dir", str(daemon.run_dir)]
        done = subprocess.run(arguments, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "[events]" in done.stderr


@pytest.mark.parametrize("place", ["tcp://127.0.0.1:{port}", "ipc:///missing/dir/e.sock"])
def test_endpoint_that_cannot_be_bound_costs_no_block(place: str, tmp_path: Path, daemon_config: str) -> None:
    """A restart with an endpoint that is taken or has no directory serves every block, and logs the endpoint."""
    with socket.create_server(("127.0.0.1", 0)) as other, supervised(tmp_path, daemon_config) as daemon:
        with Client.connect(daemon.run_dir) as client:
            for number in range(5):
                store(client, number)
        endpoint = place.format(port=other.getsockname()[1])
        (tmp_path / "kvcached.toml").write_text(daemon_config.replace("[events]", f'[events]\nendpoint = "{endpoint}"'))

        daemon.process.send_signal(signal.SIGHUP)
        daemon.await_ready()

        with Client.connect(daemon.run_dir) as client:
            assert [store(client, number).hit_blocks for number in range(5)] == [3] * 5
        assert "[events] endpoint: " in daemon.log
        assert "there are no events until the next start" in daemon.log
