"""Memory of several CUDA devices is made at the same time, and nothing is left of it where one of them makes none."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from kvcached.process.seqpacket import Packet
from kvcached.worker import cuda_maker
from kvcached.worker.cuda_maker import MadeMemory, NoCudaMemory, WantedMemory, make_cuda_memory
from tests.cuda.conftest import ROOT
from tests.cuda.test_pool import ON_DEVICE
from tests.cuda_driver.device import live_granules, settings

DEVICES = 4
SIZE_BYTES = 1 << 20
DEADLINE_S = 20.0
#: What the daemon does with its makers, in a process of its own.
PARENT = """
import asyncio
from kvcached.worker import cuda_maker
cuda_maker.MAKER = "tests.cuda.odd_maker"
asyncio.run(cuda_maker.make_cuda_memory([cuda_maker.WantedMemory(number, 1 << 20) for number in range(2)]))
"""


class Maker(NamedTuple):
    """One that waits to be told what to do."""

    pid: int
    ordinal: int
    writer: asyncio.StreamWriter

    def tell(self, what: str) -> None:
        self.writer.write(f"{what}\n".encode())

    async def gone(self) -> None:
        """Until it has ended."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            assert await asyncio.to_thread(select.select, [pidfd], [], [], DEADLINE_S) != ([], [], [])
        finally:
            os.close(pidfd)


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def granules(directory: Path) -> int:
    """What is alive on all devices."""
    return sum(live_granules(directory, number) for number in range(DEVICES))


def open_descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


class Makers:
    """Makers as they come: they wait for the test in the event loop that waits for them."""

    def __init__(self) -> None:
        self.seen: list[Maker] = []
        self._waiting: asyncio.Queue[Maker] = asyncio.Queue()

    async def next(self, count: int) -> list[Maker]:
        """As many as have come, in the order of their devices."""
        async with asyncio.timeout(DEADLINE_S):
            return sorted([await self._waiting.get() for _ in range(count)], key=lambda maker: maker.ordinal)

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pid, ordinal = (await reader.readline()).split()
        self.seen.append(Maker(int(pid), int(ordinal), writer))
        self._waiting.put_nowait(self.seen[-1])


@pytest.fixture
def on_devices(library: Path, device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Some devices, on which odd makers work."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    for name, value in settings(directory=device, devices=DEVICES, delay_us=0).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    monkeypatch.setenv("ODD_MAKER", str(tmp_path / "makers"))
    monkeypatch.setattr(cuda_maker, "MAKER", "tests.cuda.odd_maker")
    return device


@asynccontextmanager
async def makers() -> AsyncIterator[Makers]:
    met = Makers()
    server = await asyncio.start_unix_server(met.meet, os.environ["ODD_MAKER"])
    try:
        yield met
    finally:
        server.close()
        for maker in met.seen:
            maker.writer.close()


def wanted(count: int = DEVICES) -> list[WantedMemory]:
    return [WantedMemory(ordinal, SIZE_BYTES) for ordinal in range(count)]


def play(scene: Callable[[Makers, asyncio.Task[list[MadeMemory]]], Awaitable[None]], count: int = DEVICES) -> None:
    """Make memory of devices while a scene goes on; then no process and no descriptor is left."""

    async def main() -> None:
        async with makers() as met:
            before = open_descriptors()
            making = asyncio.create_task(make_cuda_memory(wanted(count)))
            await scene(met, making)
            sockets = {str(maker.writer.get_extra_info("socket").fileno()) for maker in met.seen}
            assert open_descriptors() - sockets <= before
            assert [maker.pid for maker in met.seen if exists(maker.pid)] == []

    asyncio.run(main())


def test_devices_make_their_memory_at_the_same_time(on_devices: Path) -> None:
    """All makers are there before the first has made anything, and the caller's event loop turns meanwhile."""

    async def scene(met: Makers, making: asyncio.Task[list[MadeMemory]]) -> None:
        for maker in reversed(await met.next(DEVICES)):
            maker.tell("make")
        memory = await making
        assert len({each.device for each in memory}) == DEVICES
        assert granules(on_devices) == DEVICES
        for each in memory:
            assert not os.get_inheritable(each.descriptor)
            os.close(each.descriptor)

    play(scene)
    assert granules(on_devices) == 0


def test_makers_are_bounded(on_devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more devices than may make memory at once, the next begins when one has ended."""
    monkeypatch.setattr(cuda_maker, "AT_ONCE_MAX", 2)

    async def scene(met: Makers, making: asyncio.Task[list[MadeMemory]]) -> None:
        waiting = await met.next(2)
        while len(met.seen) < DEVICES:
            assert {maker.pid for maker in met.seen if exists(maker.pid)} == {maker.pid for maker in waiting}
            waiting.pop(0).tell("make")
            waiting += await met.next(1)
        for maker in waiting:
            maker.tell("make")
        for each in await making:
            os.close(each.descriptor)

    play(scene)


@pytest.mark.parametrize("ending", ["refuse", "SIGKILL", "cancelled"])
def test_nothing_is_left_where_one_fails(on_devices: Path, ending: str) -> None:
    """One has made its memory, one fails, the others are at work: all are gone, and so is the memory."""

    async def scene(met: Makers, making: asyncio.Task[list[MadeMemory]]) -> None:
        first, second, *_ = await met.next(DEVICES)
        first.tell("make")
        await first.gone()
        assert granules(on_devices) == 1
        if ending == "cancelled":
            making.cancel()
            with pytest.raises(asyncio.CancelledError):
                await making
            return
        if ending == "SIGKILL":
            os.kill(second.pid, signal.SIGKILL)
        else:
            second.tell(ending)
        with pytest.raises(NoCudaMemory) as refused:
            await making
        killed = "its process was ended by signal 9, as the kernel does where a machine or container is out of memory"
        why = "told to refuse" if ending == "refuse" else killed
        assert str(refused.value) == f"CUDA device 1: {why}; kvcached doctor --cuda says more"
        assert not refused.value.is_permanent

    play(scene)
    assert granules(on_devices) == 0


def test_maker_that_hangs_is_an_error(on_devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that makes no memory in time is named, and its maker is killed."""
    monkeypatch.setattr(cuda_maker, "DEADLINE_S", 3)

    async def scene(met: Makers, making: asyncio.Task[list[MadeMemory]]) -> None:
        (maker,) = await met.next(1)
        with pytest.raises(NoCudaMemory, match="CUDA device 0: it made no memory within 3 s"):
            await making
        await maker.gone()

    play(scene, 1)
    assert granules(on_devices) == 0


def test_long_making_is_logged(
    on_devices: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever waits for long reads in the log for which devices."""
    monkeypatch.setattr(cuda_maker, "PROGRESS_AFTER_S", 0)
    caplog.set_level(logging.INFO, "kvcached")

    async def scene(met: Makers, making: asyncio.Task[list[MadeMemory]]) -> None:
        for maker in await met.next(2):
            maker.tell("make")
        for each in await making:
            os.close(each.descriptor)

    play(scene, 2)
    assert caplog.messages == [
        (
            "waiting for memory of CUDA devices: 1048576 bytes of device 0, 1048576 bytes of device 1; "
            "0 of 2 are made, and each may take 60 s"
        )
    ]
    assert granules(on_devices) == 0


def test_makers_do_not_outlive_the_daemon(on_devices: Path) -> None:
    """SIGKILL of the process that waits for makers ends them, too."""

    async def main() -> None:
        async with makers() as met:
            with subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT) as parent:  # noqa: ASYNC220 - does not wait
                waiting = await met.next(2)
                parent.kill()
                for maker in waiting:
                    await maker.gone()

    asyncio.run(main())
    assert granules(on_devices) == 0


def start(command: str, tmp_path: Path, config: str) -> tuple[int, str]:
    """A start that fails: its exit status, and what it says."""
    path = tmp_path / "kvcached.toml"
    path.write_text(config)
    done = subprocess.run(
        [sys.executable, "-m", "kvcached", command, "--config", str(path), "--run-dir", str(tmp_path / "run")],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


def test_missing_device_is_not_tried_again(on_devices: Path, tmp_path: Path) -> None:
    """A device that is not there is a wrong configuration: the supervisor ends with 2 after one start."""
    status, said = start("supervise", tmp_path, ON_DEVICE.replace('"cuda"', '"cuda"\ncuda_devices = [9]'))

    assert status == 2
    assert f"CUDA device 9: device 9 of {DEVICES} (name one that nvidia-smi lists" in said
    assert len([line for line in said.splitlines() if "daemon" in line and "started" in line]) == 1


@pytest.mark.parametrize(
    ("driver", "why"),
    [
        ({"FAKE_CUDA_MEMORY_MIB": "0"}, "are free (end what uses the device, or configure fewer slots)"),
        ({"FAKE_CUDA_DEVICES": "0"}, "(check nvidia-smi; in a container, start it with --gpus all)"),
    ],
)
def test_what_may_pass_is_a_failed_start(
    on_devices: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: dict[str, str], why: str
) -> None:
    """A full device, and a driver that finds none, may be otherwise at the next start: exit status 3, with a fix."""
    for name, value in driver.items():
        monkeypatch.setenv(name, value)
    status, said = start("serve", tmp_path, ON_DEVICE)

    assert status == 3
    assert "CUDA device 0: " in said
    assert why in said


def test_memory_without_a_descriptor_says_how_many_files_may_be_open(
    use_device: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the descriptor of the memory found no room, the error names the limit of open files."""
    use_device()
    monkeypatch.setattr(cuda_maker, "receive", lambda *_: Packet(b"GPU-1", [], cut=True))
    with pytest.raises(NoCudaMemory, match=r"this process may have \d+ files open") as caught:
        asyncio.run(make_cuda_memory([WantedMemory(0, SIZE_BYTES)]))
    assert (caught.value.is_permanent, caught.value.is_lost) == (False, False)
