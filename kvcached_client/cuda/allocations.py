"""Where memory of a device begins and ends: the rows of one copy must lie in one allocation, as the driver demands.

Tensors that torch makes one by one are allocations of their own, side by side or not. The driver refuses a copy of rows
that are in several of them, even where nothing lies in between (decision 0069). A pool of the daemon is one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcached_client.cuda.driver import CudaFailure, Driver


class Allocations:
    """The allocations that addresses are in. The driver is asked once for each; the memory outlives this object.

    May be used by several threads.

    Args:
        driver: in whose current context the memory is.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._known: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] = (
            np.zeros(0, np.int64),
            np.zeros(0, np.int64),
        )  #: starts in order, ends

    def starts(self, addresses: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The first byte of the allocation that each address is in; two addresses in one allocation have the same.

        Raises:
            CudaFailure: an address is in none, or the driver refused.
        """
        while True:
            starts, ends = self._known
            index = np.searchsorted(starts, addresses, "right") - 1
            unknown = addresses[(index < 0) | (addresses >= np.append(ends, 0)[index])]
            if not len(unknown):
                return starts[index]
            self._learn(int(unknown[0]))

    def _learn(self, address: int) -> None:
        start, size_bytes = map(int, self._driver.call("cuMemGetAddressRange", address))
        end = start + size_bytes
        if not start <= address < end:
            detail = f": {address:#x} is in {start:#x} to {end:#x}, it says"
            raise CudaFailure("cuMemGetAddressRange", "CUDA_ERROR_UNKNOWN", detail)
        starts, ends = self._known
        kept = (ends <= start) | (starts >= end)  # memory that was there before is not there any more
        at = int(np.searchsorted(starts[kept], start))
        self._known = np.insert(starts[kept], at, start), np.insert(ends[kept], at, end)
