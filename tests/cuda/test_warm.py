"""Memory of the daemon on CUDA devices that outlives vLLM: processes on the fake driver, which are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from kvcached_client import Admin
from kvcached_client.protocol.engine import EnginePoolStats
from tests.cuda.warm_engine import BLOCKS, RANK_BYTES, WARM
from tests.cuda_driver import trace
from tests.cuda_driver.device import GRANULE_BYTES, bring_back, live_granules, lose
from tests.daemon.supervised import Supervised, supervised
from tests.line_process import LineProcess

MODULE: Final = "tests.cuda.warm_engine"
CONFIG: Final = """
[host]
size_bytes = "4MiB"
slab_bytes = "1MiB"

[offload]
device_memory_bytes = "{}MiB"
"""
RANK_GRANULES: Final = RANK_BYTES // GRANULE_BYTES
UseDevice = Callable[..., None]


class Engine:
    """A vLLM of one process for each rank."""

    def __init__(self, run_dir: Path, claim: str, ordinals: tuple[int, ...], name: str) -> None:
        self.ranks = [
            LineProcess(MODULE, str(run_dir), claim, str(rank), str(ordinal), name, str(len(ordinals)))
            for rank, ordinal in enumerate(ordinals)
        ]
        assert [rank.hear() for rank in self.ranks] == ["ready"] * len(ordinals)
        self.memory = self.all("allocate")

    @property
    def scheduler(self) -> LineProcess:
        return self.ranks[0]

    def all(self, line: str) -> list[str]:
        """What all ranks answer, which work at the same time."""
        for rank in self.ranks:
            rank.say(line)
        return [rank.hear() for rank in self.ranks]

    def serve(self) -> str:
        """Warm up, and begin to serve: how many blocks are found, or ``cold``."""
        self.all("warm_up")
        return self.scheduler.ask(f"schedule {' '.join(self.all('pool'))}")

    def prefill(self, name: str, blocks: int) -> str:
        """Compute a prompt on all ranks, until that is known: how many blocks are named."""
        ordered = self.scheduler.ask(f"prefill {name} {blocks}")
        number, *taken = ordered.split()
        self.all(f"compute {number} {name} {' '.join(taken)}")
        return self.scheduler.ask(f"computed {' '.join(self.all('finish'))}").split()[0]

    def holds(self, name: str, blocks: int) -> list[str]:
        """Of each rank how many blocks of a prompt are found and hold what was computed."""
        found = self.scheduler.ask(f"blocks_of {name} {blocks}").replace("None", "").split()
        return self.all(f"holds {name} {' '.join(found)}")

    def kill(self) -> None:
        """SIGKILL for all processes, until they are dead."""
        for rank in self.ranks:
            rank.end()


class Node:
    """A supervised daemon, and devices."""

    def __init__(self, daemon: Supervised, device: Path, trace_path: Path, engines: ExitStack) -> None:
        self.daemon = daemon
        self.device = device
        self._trace = trace_path
        self._engines = engines
        self._started = 0

    def engine(self, *ordinals: int, name: str = "model") -> Engine:
        """A vLLM that has allocated its memory; killed at the test's end."""
        self._started += 1
        engine = Engine(self.daemon.run_dir, f"start {self._started}".replace(" ", "-"), ordinals or (0,), name)
        self._engines.callback(engine.kill)
        return engine

    def pools(self) -> tuple[EnginePoolStats, ...]:
        with Admin.connect(self.daemon.run_dir, deadline_ms=20_000) as admin:
            return admin.stats().engine_pools

    def broken_rules(self) -> list[str]:
        return trace.broken_rules(trace.read(self._trace))


OpenNode = Callable[..., Node]


@pytest.fixture
def open_node(use_device: UseDevice, device: Path, tmp_path: Path) -> Iterator[OpenNode]:
    """Start a daemon that keeps device memory; what is given is the driver's. Nothing is left on devices afterwards."""
    with ExitStack() as parts:

        def opened(*, room_mib: int = 64, **driver: object) -> Node:
            use_device(**{"delay_us": 5000, **driver})
            daemon = parts.enter_context(
                supervised(tmp_path, CONFIG.format(room_mib), pause_min_s=0.01, pause_max_s=0.01)
            )
            return Node(daemon, device, tmp_path / "trace", parts.enter_context(ExitStack()))

        yield opened
    assert [live_granules(device, number) for number in range(2)] == [0, 0]


@contextmanager
def killed_at_end(pid: int) -> Iterator[None]:
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_blocks_outlive_their_engine(open_node: OpenNode, seed: int) -> None:
    """Each vLLM that starts finds the blocks of those that were killed before it, with all their bytes."""
    node = open_node(seed=seed)
    first = node.engine()
    assert (first.memory, first.serve()) == (["daemon"], "0")
    assert first.prefill("a", 5) == "5"
    first.kill()
    second = node.engine()
    assert second.serve() == "5"
    assert second.holds("a", 5) == ["5"]
    assert second.prefill("b", 7) == "12"
    second.kill()
    third = node.engine()
    assert third.serve() == "12"
    assert [third.holds("a", 5), third.holds("b", 7)] == [["5"], ["7"]]
    assert node.broken_rules() == []
    assert live_granules(node.device) == RANK_GRANULES


def test_warming_up_writes_no_block(open_node: OpenNode) -> None:
    """What vLLM writes before it serves is gone: new memory is zero then, and kept memory is what it was."""
    node = open_node()
    first = node.engine()
    assert first.all("filled_with") == ["0"]
    first.all("warm_up")
    assert first.scheduler.ask(f"schedule {first.all('pool')[0]}") == "0"
    assert first.all("filled_with") == ["0"]
    assert first.prefill("a", BLOCKS - 1) == str(BLOCKS - 1)
    first.kill()

    second = node.engine()
    second.all("warm_up")
    assert second.scheduler.ask(f"schedule {second.all('pool')[0]}") == str(BLOCKS - 1)
    assert second.holds("a", BLOCKS - 1) == [str(BLOCKS - 1)]
    assert str(WARM) not in second.all("filled_with")[0].split()[:1]


def test_scratch_memory_is_given_back(open_node: OpenNode) -> None:
    """While vLLM warms up, a piece of scratch memory stands for all of the pool; afterwards it is gone."""
    node = open_node()
    engine = node.engine()
    assert live_granules(node.device) == RANK_GRANULES + 1
    engine.all("warm_up")
    assert engine.all("pool") != ["none"]
    assert live_granules(node.device) == RANK_GRANULES
    assert engine.all("free") == ["done"]
    assert node.broken_rules() == []


def test_blocks_are_named_when_the_stream_has_done_their_step(open_node: OpenNode) -> None:
    """While a step's kernels wait, its rank reports nothing and no block is named; a kill leaves the blocks before."""
    node = open_node()
    engine = node.engine()
    engine.serve()
    assert engine.prefill("a", 3) == "3"
    for name in ("b", "c"):
        number, *taken = engine.scheduler.ask(f"prefill {name} 4").split()
        engine.all(f"hold {number} {name} {' '.join(taken)}")
        assert engine.all("report") == ["None"]
        assert engine.scheduler.ask("computed None") == "3 True"
    engine.kill()

    second = node.engine()
    assert second.serve() == "3"
    assert second.holds("a", 3) == ["3"]
    number, *taken = second.scheduler.ask("prefill b 4").split()
    second.all(f"hold {number} b {' '.join(taken)}")
    assert second.all("report") == ["None"]
    second.all("let_run")
    assert second.all("report") == [number]
    assert second.scheduler.ask(f"computed {number}") == "7 False"
    second.kill()
    third = node.engine()
    assert third.serve() == "7"
    assert [third.holds("a", 3), third.holds("b", 4)] == [["3"], ["4"]]


def test_blocks_are_named_when_all_ranks_have_computed_them(open_node: OpenNode) -> None:
    """Of two ranks, one is late: nothing is named before its stream is done, too. Both find their bytes again."""
    node = open_node(devices=2)
    engine = node.engine(0, 1)
    assert engine.serve() == "0"
    number, *taken = engine.scheduler.ask("prefill a 4").split()
    blocks = " ".join(taken)
    assert engine.ranks[0].ask(f"compute {number} a {blocks}") == "done"
    assert engine.ranks[1].ask(f"hold {number} a {blocks}") == "done"
    assert engine.ranks[0].ask("finish") == number
    assert engine.scheduler.ask(f"computed {number} {engine.ranks[1].ask('report')}") == "0 True"
    engine.ranks[1].ask("let_run")
    assert engine.scheduler.ask(f"computed None {engine.ranks[1].ask('report')}") == "4 False"
    engine.kill()
    second = node.engine(0, 1)
    assert second.serve() == "4"
    assert second.holds("a", 4) == ["4", "4"]
    assert [live_granules(node.device, number) for number in range(2)] == [RANK_GRANULES, RANK_GRANULES]


def test_no_rank_finds_blocks_if_one_has_other_memory(open_node: OpenNode) -> None:
    """A device without room for one of two ranks leaves both cold, and nothing is named."""
    node = open_node(memory_mib=14)
    engine = node.engine(0, 0)
    assert sorted(engine.memory) == ["daemon", "own"]
    pools = [
        rank.ask("pool") if memory == "daemon" else "none"
        for rank, memory in zip(engine.ranks, engine.memory, strict=True)
    ]
    assert engine.scheduler.ask(f"schedule {' '.join(pools)}") == "cold"


def test_next_daemon_keeps_the_memory(open_node: OpenNode) -> None:
    """After SIGKILL of the daemon its engine goes on and keeps its memory; the next engine finds the blocks."""
    node = open_node()
    first = node.engine()
    first.serve()
    first.prefill("a", 5)
    node.daemon.kill_and_wait()
    (pool,) = node.pools()
    assert (pool.used, pool.named) == (True, 5)
    assert first.prefill("b", 5) == "10"

    other = node.engine()
    assert other.serve() == "0"
    assert len(node.pools()) == 2
    other.kill()
    first.kill()
    node.daemon.kill_and_wait()
    assert {pool.used for pool in node.pools()} == {False}
    found = sorted(node.engine().serve() for _ in range(2))
    assert found == ["0", "10"]


def test_memory_goes_to_the_engine_on_its_device(open_node: OpenNode) -> None:
    """Two engines of one model on two devices find each its own blocks again, whichever starts first."""
    node = open_node(devices=2)
    engines = [node.engine(ordinal) for ordinal in range(2)]
    for ordinal, engine in enumerate(engines):
        engine.serve()
        engine.prefill(f"of-{ordinal}", 3 + ordinal)
    for engine in engines:
        engine.kill()
    for ordinal in (1, 0):
        engine = node.engine(ordinal)
        assert engine.serve() == str(3 + ordinal)
        assert engine.holds(f"of-{ordinal}", 3 + ordinal) == [str(3 + ordinal)]
    assert len(node.pools()) == 2


def test_rank_on_another_device_gets_new_memory_there(open_node: OpenNode) -> None:
    """If one of two ranks has moved, its memory is made anew where it is now, and no rank finds blocks.

    If it asks first, it gets another pool, and the one before stays until its room is needed.
    """
    node = open_node(devices=2)
    first = node.engine(0, 0)
    first.serve()
    first.prefill("a", 4)
    first.kill()
    second = node.engine(0, 1)
    assert second.serve() == "0"
    assert second.prefill("a", 4) == "4"
    left = 2 * RANK_GRANULES * (len(node.pools()) - 1)
    assert [live_granules(node.device, number) for number in range(2)] == [RANK_GRANULES + left, RANK_GRANULES]
    second.kill()
    third = node.engine(0, 1)
    assert third.serve() == "4"
    assert third.holds("a", 4) == ["4", "4"]


def test_forked_child_keeps_the_memory_of_a_dead_engine(open_node: OpenNode) -> None:
    """A forked child has what the engine had open, the driver's files and its lock: others get other memory."""
    node = open_node(devices=2)
    first = node.engine(0, 1)
    first.serve()
    first.prefill("a", 5)
    with killed_at_end(int(first.ranks[1].ask("fork"))):
        first.kill()
        (pool,) = node.pools()
        assert pool.used
        assert node.engine(0, 1).serve() == "0"
        assert len(node.pools()) == 2


def test_device_makes_room_for_another_engine(open_node: OpenNode) -> None:
    """Where a device has no room, memory there that no engine uses is given back; that of a living one is not."""
    node = open_node(memory_mib=2 * RANK_BYTES // (1 << 20) - 2)
    first = node.engine(name="one")
    first.serve()
    refused = node.engine(name="two")
    assert refused.memory == ["own"]
    assert [pool.name for pool in node.pools() if pool.named or pool.used]
    refused.kill()
    first.kill()
    assert node.engine(name="two").serve() == "0"
    assert [pool.name for pool in node.pools()] == ["two"]


def test_memory_that_cannot_be_exported_is_refused(open_node: OpenNode, capfd: pytest.CaptureFixture[str]) -> None:
    """The engine says why it has its own memory, and starts."""
    node = open_node(faults="refused_export=1")
    assert node.engine().memory == ["own"]
    assert "cuMemExportToShareableHandle: CUDA_ERROR_NOT_PERMITTED" in capfd.readouterr().err


def test_lost_device_refuses_and_comes_back_with_the_blocks(
    open_node: OpenNode, capfd: pytest.CaptureFixture[str]
) -> None:
    """While a device is lost, its rank has no memory of it; when it is back with what it held, blocks are found."""
    node = open_node()
    first = node.engine()
    first.serve()
    first.prefill("a", 5)
    first.kill()
    lose(node.device)
    bring_back(node.device, keeps_memory=True)
    second = node.engine()
    assert second.serve() == "5"
    assert second.holds("a", 5) == ["5"]
    second.kill()
    lose(node.device)
    bring_back(node.device, keeps_memory=False)
    third = node.engine()
    assert "the device does not know the memory that the daemon has kept" in capfd.readouterr().err
    assert (third.memory, third.serve()) == (["daemon"], "0")
    assert third.prefill("a", 5) == "5"
    third.kill()
    assert node.engine().serve() == "5"


def test_failed_device_names_nothing_any_more(open_node: OpenNode) -> None:
    """Once the rank's device has failed, no block is named, and vLLM is not kept busy for it."""
    node = open_node()
    engine = node.engine()
    engine.serve()
    engine.prefill("a", 3)
    number, *taken = engine.scheduler.ask("prefill b 4").split()
    lose(node.device)
    engine.all(f"compute {number} b {' '.join(taken)}")
    assert engine.all("finish") == ["-1"]
    assert engine.scheduler.ask("computed -1") == "3 False"
    engine.kill()
    bring_back(node.device, keeps_memory=True)
    second = node.engine()
    assert second.serve() == "3"
    assert second.holds("a", 3) == ["3"]
