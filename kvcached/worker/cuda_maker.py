"""New memory of CUDA devices, made by processes that end once they have handed it over: the daemon loads no driver.

The daemon's event loop turns meanwhile. Where one fails, the others are killed, and what they have made is given back.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from kvcached.memory.available import NotEnoughMemory
from kvcached.process.readable import readable
from kvcached.process.seqpacket import receive
from kvcached.worker.exits import DEVICE_LOST, MISSING, NO_ROOM
from kvcached_client.errors import DeviceError

MAKER: Final = "kvcached.worker.make_cuda_memory"
#: The first process that uses a device loads the driver and creates a context.
DEADLINE_S: Final = 60.0
#: In place of the number of a device.
BY_UUID: Final = -1
#: Whoever waits longer than this for the start is told what for.
PROGRESS_AFTER_S: Final = 2.0
#: As many devices as a large node has. Each maker takes some hundred MiB of this machine while it lives.
AT_ONCE_MAX: Final = 16
#: A maker that has handed its memory over has nothing left to do but to end.
_END_S: Final = 5.0
_UUID_BYTES_MAX: Final = 64
#: The UUIDs of more devices than a machine has.
_LIST_BYTES_MAX: Final = 16 * 1024
_SAID_BYTES_MAX: Final = 16 * 1024

_log: Final = logging.getLogger(__name__)


class WantedMemory(NamedTuple):
    """Memory that is to be made.

    Attributes:
        ordinal: number of the device, as this machine counts; `BY_UUID` if only the UUID is known.
        size_bytes: how much.
        device: UUID of the device that it must be, whatever the number says; empty if the number says it.
    """

    ordinal: int
    size_bytes: int
    device: str = ""

    @property
    def shown(self) -> str:
        """The device for people."""
        return self.device if self.ordinal == BY_UUID else str(self.ordinal)


class MadeMemory(NamedTuple):
    """Memory of one device.

    Attributes:
        descriptor: of the memory, close-on-exec; the caller's.
        device: UUID of the device.
    """

    descriptor: int
    device: str


class NoCudaMemory(DeviceError):
    """A device has made no memory.

    Attributes:
        is_permanent: there is no such device, or no package to reach it by: it will not get better by itself.
        is_lost: the driver lists the device, and it does nothing.
        listed: UUIDs of the devices that the driver listed meanwhile, by number; none if it was not asked.
        is_of_room: the device has too little memory left.
    """

    def __init__(
        self,
        device: str,
        reason: str,
        *,
        is_permanent: bool = False,
        is_lost: bool = False,
        listed: tuple[str, ...] = (),
        is_of_room: bool = False,
    ) -> None:
        super().__init__(f"CUDA device {device}: {reason}; kvcached doctor --cuda says more")
        self.is_permanent = is_permanent
        self.is_lost = is_lost
        self.listed = listed
        self.is_of_room = is_of_room


async def make_cuda_memory(wanted: Sequence[WantedMemory], turns: asyncio.Semaphore | None = None) -> list[MadeMemory]:
    """Make memory on devices, on `AT_ONCE_MAX` of them at the same time. What is in it is undefined.

    On an error, also where this is cancelled, no memory is left, and every process has ended or been killed.

    Args:
        wanted: the memory.
        turns: limits the number of processes together with other calls; a limit of its own if None.

    Raises:
        NoCudaMemory: the first device that has made none: there is no driver, no such device, or not so much memory.
        OSError: a process cannot be started.
    """
    return await _Making(wanted, turns or asyncio.Semaphore(AT_ONCE_MAX)).all() if wanted else []


async def make_on_device(turns: asyncio.Semaphore, device: str, size_bytes: int) -> int:
    """Make memory on the device with a UUID; returns its descriptor, which is the caller's.

    Args:
        turns: limits the number of processes together with other calls.
        device: the UUID.
        size_bytes: how much.

    Raises:
        NotEnoughMemory: there is not so much now.
        NoCudaMemory: nothing was made for another reason, which more room does not change.
        OSError: a process cannot be started.
    """
    try:
        (made,) = await make_cuda_memory([WantedMemory(BY_UUID, size_bytes, device)], turns)
    except NoCudaMemory as error:
        if not error.is_of_room:
            raise
        raise NotEnoughMemory(str(error)) from error
    return made.descriptor


class _Making:
    """The makers of some memory, and what they have made, by their places in what is wanted."""

    def __init__(self, wanted: Sequence[WantedMemory], turns: asyncio.Semaphore) -> None:
        self._wanted = wanted
        self._turns = turns
        self._makers: dict[int, _Maker] = {}
        self._made: dict[int, MadeMemory] = {}

    async def all(self) -> list[MadeMemory]:
        progress = asyncio.get_running_loop().call_later(PROGRESS_AFTER_S, self._log_progress)
        tasks = [asyncio.create_task(self._make(index, each)) for index, each in enumerate(self._wanted)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        except BaseException:
            await self._give_up(tasks)
            raise
        finally:
            progress.cancel()
        return [self._made[index] for index in range(len(self._wanted))]

    async def _make(self, index: int, wanted: WantedMemory) -> None:
        async with self._turns:
            maker = self._makers[index] = _Maker(wanted)
            try:
                async with asyncio.timeout(DEADLINE_S):
                    self._made[index] = await maker.result()
            except TimeoutError:
                raise NoCudaMemory(wanted.shown, f"it made no memory within {DEADLINE_S:g} s") from None
            finally:
                await maker.close(may_end=index in self._made)

    async def _give_up(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Who waits for a killed maker sees its end, and closes it; a task that is cancelled there would not."""
        for index, task in enumerate(tasks):
            if index in self._makers:
                self._makers[index].kill()
            else:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for memory in self._made.values():
            os.close(memory.descriptor)

    def _log_progress(self) -> None:
        waiting = [each for index, each in enumerate(self._wanted) if index not in self._made]
        _log.info(
            "waiting for memory of CUDA devices: %s; %d of %d are made, and each may take %g s",
            ", ".join(f"{each.size_bytes} bytes of device {each.shown}" for each in waiting),
            len(self._made),
            len(self._wanted),
            DEADLINE_S,
        )


def _ending(status: int) -> str:
    """How a process ended that has said nothing."""
    if status == -signal.SIGKILL:
        return "its process was ended by signal 9, as the kernel does where a machine or container is out of memory"
    return f"its process ended with {status}"


class _Maker:
    """The process that makes the memory of one device."""

    def __init__(self, wanted: WantedMemory) -> None:
        """Start it.

        Raises:
            OSError: it cannot be started.
        """
        self._device = wanted.shown
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._said = os.memfd_create("kvcached-maker-says", os.MFD_CLOEXEC)
        try:
            with theirs:
                numbers = (theirs.fileno(), os.getpid(), *(each for each in wanted if each != ""))
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", MAKER, *map(str, numbers)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._said,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # Ctrl-C at the terminal is for the daemon
                )
            try:
                self._pidfd = os.pidfd_open(self._process.pid)
            except OSError:
                self._process.kill()
                self._process.wait()
                raise
        except OSError:
            self._connection.close()
            os.close(self._said)
            raise

    async def result(self) -> MadeMemory:
        """What it has made.

        Raises:
            NoCudaMemory: it has ended without.
        """
        await readable(self._connection.fileno())
        packet = receive(self._connection, _LIST_BYTES_MAX, 1)
        listed: tuple[str, ...] = ()
        if packet is not None and not packet.descriptors and not packet.cut:
            listed = tuple(packet.data.decode().splitlines())
            await readable(self._connection.fileno())
            packet = receive(self._connection, _UUID_BYTES_MAX, 1)
        if packet is not None and len(packet.descriptors) == 1:
            return MadeMemory(packet.descriptors[0], packet.data.decode())
        if packet is not None and packet.cut:
            files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            reason = f"its memory came without a descriptor: this process may have {files} files open, and has them all"
            raise NoCudaMemory(self._device, reason)
        await readable(self._pidfd)
        status = self._process.wait()
        lines = os.pread(self._said, _SAID_BYTES_MAX, 0).decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else _ending(status)
        raise NoCudaMemory(
            self._device,
            reason,
            is_permanent=status == MISSING,
            is_lost=status == DEVICE_LOST,
            is_of_room=status == NO_ROOM,
            listed=listed,
        )

    def kill(self) -> None:
        """End it now. Does nothing when it has ended."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def close(self, *, may_end: bool) -> None:
        """Wait until it is dead.

        Args:
            may_end: it has done its work, and gets a moment to end by itself before it is killed.
        """
        self._connection.close()
        try:
            if may_end:
                await self._ended()
            self.kill()
            await self._ended()
        finally:
            self._process.poll()
            os.close(self._pidfd)
            os.close(self._said)
            self._pidfd = -1

    async def _ended(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await readable(self._pidfd)
