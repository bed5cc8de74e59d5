"""Copy processes of engines on CUDA: engine, copy process and daemon are separate processes on the fake driver."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvcached_client.failpoints import LOG_VARIABLE, VARIABLE
from tests.cuda.conftest import RunProgram
from tests.cuda.test_offload import Node, broken_rules, node
from tests.cuda_driver import trace
from tests.cuda_driver.device import live_granules
from tests.daemon.test_offload import is_sound, nothing_held, seconds_until
from tests.line_process import LineProcess

__all__ = ["node"]

MODULE = "tests.cuda.copying_engine"
KINDS = ("descriptor", "handles")
BLOCKS = 6
WHOLE = f"{BLOCKS} True"
PATIENCE_S = 30
KILLED = "the copy process has ended with status -9"
#: Where a process that stores, and then loads, may die.
PLACES = (
    "blocks.store.cleared",
    "blocks.copy",
    "blocks.store.copied",
    "blocks.store.header@3",
    "offload.store.written",
    "blocks.copy@2",
    "offload.load.copied",
)


@contextmanager
def engine_of(node: Node, kind: str, *, leave: bool = True, **driver: object) -> Iterator[LineProcess]:
    """An engine that is connected."""
    with node.engine(module=MODULE, argument=kind, leave=False, **driver) as engine:
        assert engine.ask("connect") == "done"
        yield engine
        if leave:
            assert [engine.ask("leave"), engine.ask("free")] == ["done"] * 2


def wait_until(reached: Callable[[], bool]) -> None:
    start = time.monotonic()
    while not reached():
        assert time.monotonic() - start < PATIENCE_S
        time.sleep(0.01)


def is_stopped(pid: int) -> bool:
    return "State:\tT" in Path(f"/proc/{pid}/status").read_text()


def is_dead(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("node", [1, 2], indirect=True)
def test_blocks_of_one_engine_are_loaded_by_another(node: Node, kind: str) -> None:
    """Late kernels write blocks, and late kernels read what loads overwrite; the engines copy and pin nothing.

    What an engine has registered is the page of its marks.
    """
    with engine_of(node, kind) as first, engine_of(node, kind) as second:
        engines = {first.process.pid, second.process.pid}
        names = [f"prompt-{number}" for number in range(4)]
        for name in names:
            assert first.ask(f"store {name} {BLOCKS}") == "stored"
            assert second.ask(f"load {name} {BLOCKS}") == WHOLE

    records = node.records()
    kernels, copies = trace.ran(records, "host function"), trace.ran(records, "copy")
    assert broken_rules(node) == []
    assert len(trace.calls(records, "cuMemcpyBatchAsync")) == len(copies) == len(kernels) == 2 * len(names)
    assert all(kernel.order < copy.order for kernel, copy in zip(kernels, copies, strict=True))
    assert {record.process for record in kernels} == engines
    assert not engines & {record.process for record in records if "Memcpy" in record.name}
    pinned = [each for each in trace.calls(records, "cuMemHostRegister") if each.process in engines]
    assert [each.arguments["size"] for each in pinned] == [4096] * 2
    assert is_sound(node.running)


@pytest.mark.parametrize("kind", KINDS)
def test_copy_begins_when_its_mark_is_reached(node: Node, kind: str) -> None:
    """An order behind a kernel that has not run is not carried out, and it is when the kernel has run."""
    with engine_of(node, kind) as engine:
        assert engine.ask("hold") == "done"
        assert engine.ask(f"begin_store a {BLOCKS}") == "1"
        time.sleep(0.2)
        assert engine.ask("ended") == "[]"
        assert trace.ran(node.records(), "copy") == []
        assert engine.ask("release") == "done"
        assert engine.ask("outcome").startswith("Outcome(number=1, bad=(), error='',")
        assert engine.ask(f"load a {BLOCKS}") == WHOLE
    assert broken_rules(node) == []


@pytest.mark.parametrize(("place", "kind"), [(place, KINDS[at % 2]) for at, place in enumerate(PLACES)])
def test_killed_copy_process_fails_its_order_and_leaves_no_wrong_byte(
    node: Node, tmp_path: Path, place: str, kind: str
) -> None:
    """SIGKILL anywhere: the order's outcome says so, the engine connects again, and all that it then hits is right."""
    name, _, at = place.partition("@")
    with node.engine(module=MODULE, argument=kind, leave=False) as engine:
        engine.ask(f"let {VARIABLE} {name}=kill@{at or 1}")
        engine.ask(f"let {LOG_VARIABLE} {tmp_path / 'reached'}")
        assert engine.ask("connect") == "done"
        ends = [engine.ask(f"store a {BLOCKS}")]
        if ends == ["stored"]:
            ends.append(engine.ask(f"load a {BLOCKS}"))
        assert ends[-1] == KILLED
        assert (tmp_path / "reached").read_text().split() == [name]

        assert [engine.ask("leave"), engine.ask("connect")] == ["done"] * 2
        seconds_until(node.daemon.run_dir, nothing_held)
        if len(ends) == 1:
            assert [engine.ask(f"load a {BLOCKS}"), engine.ask(f"store a {BLOCKS}")] == ["0", "stored"]
        assert engine.ask(f"load a {BLOCKS}") == WHOLE
        assert [engine.ask("leave"), engine.ask("free")] == ["done"] * 2
    assert broken_rules(node) == []
    assert is_sound(node.running)


def test_engine_of_many_marks_gets_another_process(run_program: RunProgram) -> None:
    """After 2^31 marks a process that joins does not wait for the first one."""
    assert run_program("old_marks").said == 1


@pytest.mark.parametrize("kind", KINDS)
def test_engine_killed_before_its_mark_leaves_nothing(node: Node, kind: str) -> None:
    """SIGKILL of the engine while copies wait for its kernels: none of the blocks is found, and all memory is free."""
    with engine_of(node, kind) as other:
        assert other.ask(f"store b {BLOCKS}") == "stored"
        with engine_of(node, kind, leave=False) as engine:
            pid = int(engine.ask("pid"))
            assert engine.ask("hold") == "done"
            assert engine.ask(f"begin_store a {BLOCKS}") == "1"
            assert engine.ask(f"begin_load b {BLOCKS}") == "2"
        wait_until(lambda: is_dead(pid))
        assert seconds_until(node.daemon.run_dir, nothing_held) <= PATIENCE_S
        assert [other.ask("load a 6"), other.ask("load b 6")] == ["0", WHOLE]
        assert [other.ask("store a 6"), other.ask("load a 6")] == ["stored", WHOLE]
    assert broken_rules(node) == []
    assert is_sound(node.running)


@pytest.mark.parametrize("kind", KINDS)
def test_dead_engine_s_memory_and_slots_wait_for_the_death_of_its_copy_process(node: Node, kind: str) -> None:
    """While a stopped copy process could go on, nobody gets its host slots, nor the device memory that it maps."""
    with engine_of(node, kind) as other:
        before = live_granules(node.device)
        with node.engine(module=MODULE, argument=kind, leave=False) as engine:
            engine.ask(f"let {VARIABLE} blocks.store.copied=stop")
            assert engine.ask("connect") == "done"
            pid = int(engine.ask("pid"))
            assert engine.ask(f"begin_store a {BLOCKS}") == "1"
            wait_until(lambda: is_stopped(pid))
        try:
            seconds_until(node.daemon.run_dir, lambda stats: stats.states["quarantined"] == BLOCKS)
            assert live_granules(node.device) > before
        finally:
            os.kill(pid, signal.SIGCONT)  # it finds that the engine is dead, and ends
        seconds_until(node.daemon.run_dir, nothing_held)
        wait_until(lambda: live_granules(node.device) == before)
        assert other.ask("load a 6") in ({"0"} if kind == "handles" else {"0", WHOLE})
        assert [other.ask("store b 6"), other.ask("load b 6")] == ["stored", WHOLE]
    assert broken_rules(node) == []
    assert is_sound(node.running)


def test_copy_process_ends_with_the_daemon(node: Node) -> None:
    """SIGKILL of the daemon: the engine finds its process dead, and goes on with the next daemon."""
    with engine_of(node, "descriptor") as engine:
        assert engine.ask(f"store a {BLOCKS}") == "stored"
        pid = int(engine.ask("pid"))
        node.daemon.kill_and_wait()
        wait_until(lambda: is_dead(pid))
        assert [engine.ask("leave"), engine.ask("connect")] == ["done"] * 2
        assert engine.ask(f"load a {BLOCKS}") == WHOLE
    assert broken_rules(node) == []


@pytest.mark.parametrize("kind", KINDS)
def test_device_that_fails_the_copies_does_not_fail_the_engine(node: Node, kind: str) -> None:
    """A copy that fails for good ends the copy process, not the engine, which goes on with another one."""
    with node.engine(module=MODULE, argument=kind, leave=False) as engine:
        engine.ask("let FAKE_CUDA_FAULTS launch_failure=@2")
        assert [engine.ask("connect"), engine.ask("store a 6")] == ["done", "stored"]
        assert engine.ask("store b 6") == "the copy process has ended with status 5, as its device has failed"
        assert engine.ask("kernels") == "[1]"
        engine.ask("let FAKE_CUDA_FAULTS launch_failure=0")
        assert [engine.ask("leave"), engine.ask("connect")] == ["done"] * 2
        assert [engine.ask("load a 6"), engine.ask("load b 6")] == [WHOLE, "0"]
        assert [engine.ask("store b 6"), engine.ask("load b 6")] == ["stored", WHOLE]
        assert [engine.ask("leave"), engine.ask("free")] == ["done"] * 2
    assert is_sound(node.running)


def test_refused_shares_and_marks_are_errors_of_the_start(node: Node) -> None:
    """Where the driver shares or registers nothing, or streams know no values, the start says so; nothing is left."""
    with node.engine(module=MODULE, argument="handles", leave=False, faults="refused_export=1") as engine:
        assert engine.ask("connect") == "CudaFailure: cuIpcGetMemHandle: CUDA_ERROR_NOT_PERMITTED"
        assert engine.ask("free") == "done"
    with node.engine(module=MODULE, argument="descriptor", leave=False, faults="refused_values=1") as engine:
        assert engine.ask("connect") == "CudaFailure: cuStreamWriteValue32: CUDA_ERROR_NOT_SUPPORTED"
        assert engine.ask("free") == "done"
    with node.engine(module=MODULE, argument="descriptor", leave=False) as engine:
        engine.ask("let FAKE_CUDA_FAULTS refused_values=1")
        assert engine.ask("connect") == "DeviceError: cuStreamWaitValue32: CUDA_ERROR_NOT_SUPPORTED"
        engine.ask("let FAKE_CUDA_FAULTS refused_registration=1")
        assert engine.ask("connect") == "DeviceError: cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY"
        engine.ask("let FAKE_CUDA_FAULTS refused_registration=@2")  # the host pool: copies are slower
        assert [engine.ask("connect"), engine.ask("store a 6"), engine.ask("load a 6")] == ["done", "stored", WHOLE]
        assert [engine.ask("leave"), engine.ask("free")] == ["done"] * 2
    assert seconds_until(node.daemon.run_dir, nothing_held) <= PATIENCE_S


@pytest.mark.parametrize("kind", KINDS)
def test_marks_of_others_are_refused(node: Node, kind: str) -> None:
    """What is no mark, and a mark of another copy process, orders nothing: the blocks might not be written yet."""
    with engine_of(node, kind) as engine:
        assert engine.ask("store_behind_others a") == "[]"
        assert [engine.ask("store b 6"), engine.ask("load b 6")] == ["stored", WHOLE]
    assert broken_rules(node) == []


def test_page_that_a_stream_is_to_write_stays_mapped(run_program: RunProgram) -> None:
    """A page of marks that is given up without waiting is mapped until the process ends; one that is closed is not."""
    assert run_program("marks_left").said == [1, 0]


def test_mistakes_about_marks_are_refused(node: Node) -> None:
    """A copy without a mark is refused, and so are more marks than the page has words for; then it goes on."""
    with engine_of(node, "descriptor") as engine:
        assert "no mark for tensors on a CUDA device" in engine.ask("store_without_mark a")
        assert engine.ask("mark_too_often") == "1024 mark 1025: the device has not come to mark 1"
        assert engine.ask("mark_again 1500") == "done"
        assert [engine.ask("store b 6"), engine.ask("load b 6")] == ["stored", WHOLE]
    assert broken_rules(node) == []


def test_page_of_marks_is_given_up_after_the_last_mark(node: Node) -> None:
    """Closing a copy process while kernels are queued before a mark: the page is unregistered when they have run."""
    with engine_of(node, "descriptor") as engine:
        assert [engine.ask("compute_slowly"), engine.ask(f"begin_store a {BLOCKS}")] == ["done", "1"]
        assert engine.ask("leave") == "done"
        assert engine.ask("mark") == "a mark for a copy process that is closed"
        assert engine.ask("kernels") == "[1]"
        assert [engine.ask("connect"), engine.ask("mark")] == ["done", "1"]
        assert engine.ask("load a 6") == "0"
    assert broken_rules(node) == []


NAMES = "abcd"
#: How a request may end when somebody was killed, or the copy process's device has failed.
ENDINGS = ("the copy process has ended", "Stale", "DaemonUnreachable")


def serve_until_death(engine: LineProcess, chance: random.Random) -> None:
    """Requests until one of them fails; what they find is right."""
    for _ in range(20):
        try:
            said = engine.ask(f"serve {chance.choice(NAMES)} {BLOCKS}")
        except BrokenPipeError:
            return
        if said not in {"stored", WHOLE}:
            assert said == "" or said.startswith(ENDINGS), said
            return


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("node", range(1, 4), indirect=True)
def test_no_byte_is_wrong_whoever_is_killed(node: Node, request: pytest.FixtureRequest) -> None:
    """SIGKILL of engine or copy process at random instants of copies, on a device that fails: each hit is right."""
    chance = random.Random(request.node.name)
    for _ in range(12):
        driver = {"seed": chance.randrange(1 << 16), "delay_us": chance.choice((0, 2_000, 20_000))}
        with node.engine(module=MODULE, argument=chance.choice(KINDS), leave=False, **driver) as engine:
            errors = ("launch_failure=0", f"launch_failure=@{chance.randint(1, 6)}", "refused_registration=@2")
            engine.ask(f"let FAKE_CUDA_FAULTS {chance.choice(errors)}")
            assert engine.ask("connect") == "done"
            copies = int(engine.ask("pid"))
            victim = chance.choice((copies, engine.process.pid))
            killer = threading.Timer(chance.random() / 2, os.kill, (victim, signal.SIGKILL))
            killer.start()
            serve_until_death(engine, chance)
            killer.cancel()
            killer.join()
        wait_until(lambda pid=copies: is_dead(pid))  # type: ignore[misc]
        seconds_until(node.daemon.run_dir, nothing_held)
    with engine_of(node, "descriptor") as engine:
        for name in NAMES:
            assert engine.ask(f"load {name} {BLOCKS}") in {"0", WHOLE}
            assert engine.ask(f"serve {name} {BLOCKS}") in {"stored", WHOLE}
    assert is_sound(node.running)
