"""Marks in an engine's streams behind which another process copies: numbers in a page that both have registered.

A stream writes the number of a mark once the work before the mark is over, and a stream of the other process waits for
the number. Where the engine dies before that, its number is never written: nothing is copied that may be unwritten.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import secrets
import threading
from collections.abc import Callable
from typing import Final

from kvcached_client.cuda.device import Device
from kvcached_client.cuda.driver import CudaFailure, Stream
from kvcached_client.cuda.engine import EngineDevice
from kvcached_client.errors import bad_value

_WORD_BYTES: Final = 4
#: Marks that may be ahead of the device at a time: each has a word of the page.
MARKS_MAX: Final = mmap.PAGESIZE // _WORD_BYTES
_NUMBERS: Final = 1 << 32
#: Writers count from numbers of their own on, multiples of `_NUMBERS`: so a mark of another writer is told apart.
_WRITERS: Final = 1 << 31

_log: Final = logging.getLogger(__name__)


#: Pages that are registered. A device may still write them when nobody needs them any more; unmapped, their addresses
#: would be those of other memory.
_registered: Final[set[_Page]] = set()


class _Page:
    """The page of marks, registered with a device. It stays mapped until it is closed."""

    def __init__(self, device: Device, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, mmap.PAGESIZE)
        self.words = memoryview(self._memory).cast("I")
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._memory))
        self._registration = device.register(address, mmap.PAGESIZE)
        _registered.add(self)

    def close(self) -> None:
        """Unregister it. No stream may still be to write it.

        Raises:
            CudaFailure: the driver refused; the page stays mapped.
        """
        self._registration.close()
        _registered.discard(self)

    def place(self, number: int) -> int:
        """Where the device finds the word of a mark."""
        return self._registration.device_address + number % MARKS_MAX * _WORD_BYTES


class MarkWriter:
    """The engine's side: makes marks. Any thread may call it.

    Attributes:
        descriptor: of the page, for the other process.
    """

    def __init__(self, owner: EngineDevice) -> None:
        """A page of marks for streams of a device.

        Raises:
            CudaFailure: streams of this device write no values, or the driver refused another step.
        """
        self._owner = owner
        self._lock = threading.Lock()
        self._first = self._last = (1 + secrets.randbelow(_WRITERS - 1)) * _NUMBERS  #: no mark, but the one before it
        self.descriptor = os.memfd_create("kvcached-marks", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, mmap.PAGESIZE)
            with owner.device.current():
                self._page = _Page(owner.device, self.descriptor)
                try:
                    _try(owner.device, lambda stream: stream.write(self._page.place(0), 0))
                except BaseException:
                    self._page.close()
                    raise
        except BaseException:
            os.close(self.descriptor)
            raise
        for place in range(1, MARKS_MAX):  # as if a mark before the first one of each word were reached
            self._page.words[place] = place - MARKS_MAX + _NUMBERS

    def mark(self, stream: int) -> int:
        """A mark behind all work that a stream has now. Does not wait.

        Args:
            stream: the stream's handle; 0 is the default stream. It captures no graph.

        Raises:
            BadRequest: `MARKS_MAX` marks are ahead of the device; or this is closed.
            CudaFailure: the driver refused.
        """
        device = self._owner.device
        with self._lock:
            if self.descriptor < 0:
                raise bad_value("a mark for a copy process that is closed", "start another one")
            number = self._last + 1
            if not self._is_reached(number - MARKS_MAX):
                nth = number - self._first
                raise bad_value(
                    f"mark {nth}: the device has not come to mark {nth - MARKS_MAX}",
                    "make one mark for all copies of a step, and wait for outcomes",
                )
            with device.current():
                handle, place = device.driver.names.CUstream(stream), self._page.place(number)
                device.driver.call("cuStreamWriteValue32", handle, place, number % _NUMBERS, 0)
            self._last = number
        return number

    def has_made(self, mark: object) -> bool:
        """Whether this is a mark that `mark` has returned."""
        return isinstance(mark, int) and self._first < mark <= self._last

    def is_reached(self, mark: int) -> bool:
        """Whether the device has come to a mark that `mark` has returned, or to a later one in its place."""
        return (self._page.words[mark % MARKS_MAX] - mark) % _NUMBERS < _NUMBERS // 2

    def close(self, *, waits: bool = True) -> None:
        """Give the page up, once the device has come to all marks. Where it has failed, the page stays registered.

        Args:
            waits: for marks that are ahead of the device; else the page stays registered then, too.
        """
        with self._lock:
            descriptor, self.descriptor = self.descriptor, -1
        if descriptor < 0:
            return
        os.close(descriptor)
        try:
            with self._owner.device.current():
                if not all(map(self._is_reached, range(self._oldest(), self._last + 1))):
                    if not waits:
                        return
                    self._owner.device.driver.call("cuCtxSynchronize")
                self._page.close()
        except CudaFailure as error:
            _log.warning("the page of marks is left, but not unregistered: %s", error)

    def _oldest(self) -> int:
        """The oldest mark that may be ahead of the device."""
        return max(self._first, self._last - MARKS_MAX) + 1

    def _is_reached(self, number: int) -> bool:
        """Of the last `MARKS_MAX` marks, and of those that were never made."""
        return self._page.words[number % MARKS_MAX] == number % _NUMBERS


class MarkReader:
    """The side of the process that copies. It has the page until it ends."""

    def __init__(self, device: Device, descriptor: int) -> None:
        """The device is current to this thread; the descriptor stays the caller's.

        Raises:
            CudaFailure: streams of this device wait for no values, or the driver refused another step.
        """
        self._device = device
        self._page = _Page(device, descriptor)
        reached = self._page.words[0]  # the engine may have made marks for the process before this one
        _try(device, lambda stream: stream.wait_value(self._page.place(0), reached))

    def mark(self, number: int) -> SharedMark:
        """A mark that the engine has made."""
        return SharedMark(self._page, number)

    def works(self) -> bool:
        """See `Device.works`."""
        return self._device.works()


class SharedMark:
    """A mark of another process: a `Mark`."""

    def __init__(self, page: _Page, number: int) -> None:
        self._page = page
        self._number = number

    def hold(self, stream: Stream) -> None:
        """See `Mark.hold`."""
        stream.wait_value(self._page.place(self._number), self._number % _NUMBERS)


def _try(device: Device, queue: Callable[[Stream], None]) -> None:
    """Let a stream do what streams of some devices and drivers cannot."""
    stream = device.make_stream()
    try:
        queue(stream)
    finally:
        stream.finish()
