"""Which steps a worker has computed: those that it has launched; on a CUDA device, those that its stream has done."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvcached_client.errors import DeviceError

if TYPE_CHECKING:
    from kvcached_client.blocks.pages import EnginePages
    from kvcached_client.cuda.streams import StreamFences
    from kvcached_client.types import FenceSequence

#: In place of a step: the device has failed, so that nobody will know what it has computed.
NEVER: Final = -1

log = logging.getLogger("vllm.kvcached")


def steps_of(pages: EnginePages, current_stream: Callable[[int], int]) -> ComputedSteps:
    """The steps of the worker that has these tensors.

    Args:
        pages: the worker's tensors.
        current_stream: the handle of the calling thread's current stream on a device, by its ordinal.

    Raises:
        BadRequest: the tensors are on several devices.
        DeviceError: this process cannot use their device.
    """
    if not pages.is_on_cuda:
        return ComputedSteps()
    from kvcached_client.cuda.streams import StreamFences  # noqa: PLC0415 - only tensors on a device need the driver

    device = pages.device
    return ComputedSteps(StreamFences(device.device.uuid), lambda: current_stream(device.ordinal))


class ComputedSteps:
    """The steps of one worker. No call waits.

    Args:
        fences: of the worker's CUDA device; None where a step is computed when it returns.
        stream: the handle of the stream on which the calling thread computes.
    """

    def __init__(self, fences: StreamFences | None = None, stream: Callable[[], int] = lambda: 0) -> None:
        self._fences = fences
        self._stream = stream
        self._launched: deque[tuple[FenceSequence, int]] = deque()
        self._last = self._reported = 0

    def launched(self, number: int) -> None:
        """Note a step whose kernels this thread has launched."""
        if self._fences is None:
            self._last = number
        elif self._last != NEVER:
            try:
                self._launched.append((self._fences.next(self._stream()), number))
            except DeviceError as error:
                self._fail(error)

    def take(self) -> int | None:
        """The last step that is computed; None if that is the one which was returned last."""
        self._look()
        if self._last == self._reported:
            return None
        self._reported = self._last
        return self._last

    def _look(self) -> None:
        if self._fences is None or self._last == NEVER:
            return
        try:
            signalled = self._fences.signalled()
        except DeviceError as error:
            self._fail(error)
            return
        while self._launched and self._launched[0][0] <= signalled:
            self._last = self._launched.popleft()[1]

    def _fail(self, error: DeviceError) -> None:
        log.warning("kvcached: no block is kept any more that is computed from now on: %s", error)
        self._launched.clear()
        self._last = NEVER
