"""A fake device, seen from outside of the driver: its environment and what it holds."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

GRANULE_BYTES = 2 << 20
PREFIX = "FAKE_CUDA_"


def settings(**values: object) -> dict[str, str]:
    """Environment variables of the driver: `delay_us=0` is `FAKE_CUDA_DELAY_US=0`; `directory` is the device's."""
    return {f"{PREFIX}{name.upper()}": str(value) for name, value in values.items()}


@contextmanager
def device_directory() -> Iterator[Path]:
    """A directory on shared memory, where no disk writes what a device holds."""
    shared = Path("/dev/shm")  # noqa: S108 - made by mkdtemp, for this user alone
    directory = Path(tempfile.mkdtemp(prefix="fake-cuda-", dir=shared if os.access(shared, os.W_OK) else None))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


_LOSSES_OFFSET = 80  # of `Page` in source/device.c: behind two counters and one for each of eight devices


def lose(directory: Path, device: int = 0) -> None:
    """The device is lost: every call of every process that uses it fails from now on, and new processes find none."""
    _change_losses(directory, device, lambda losses: losses | 1)


def bring_back(directory: Path, device: int = 0, *, keeps_memory: bool) -> bool:
    """A device that was lost is there again for new processes; without what it held, its memory cannot be imported.

    Returns whether it was lost; does nothing if it was not.
    """
    was_lost = bool(_change_losses(directory, device, lambda losses: losses) & 1)
    if was_lost and not keeps_memory:
        for path in directory.glob(f"memory-{device}-*"):
            path.unlink()
    _change_losses(directory, device, lambda losses: losses + (losses & 1))
    return was_lost


def _change_losses(directory: Path, device: int, change: Callable[[int], int]) -> int:
    with (directory / "page").open("r+b") as page, mmap.mmap(page.fileno(), 4096) as shared:
        place = _LOSSES_OFFSET + 4 * device
        (losses,) = struct.unpack_from("I", shared, place)
        struct.pack_into("I", shared, place, change(losses))
    return int(losses)


def _is_held(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def live_granules(directory: Path, device: int = 0) -> int:
    """Granules of 2 MiB that a handle, a mapping or a descriptor of any process holds: the kernel's own count."""
    held = [path for path in directory.glob(f"memory-{device}-*") if _is_held(path)]
    return sum(path.stat().st_size for path in held) // GRANULE_BYTES
