"""Exit statuses of processes that make or map device memory, which the daemon tells apart."""

from typing import Final

#: The device, or what is needed to reach it, is missing until somebody installs it or names another one.
MISSING: Final = 2
#: The driver refused, or is not there yet.
REFUSED: Final = 3
#: The driver lists the device, and it does nothing, or nothing any more.
DEVICE_LOST: Final = 4
#: Of a worker: the device works, and does not know the memory that was kept.
MEMORY_GONE: Final = 5
#: Of a worker that was ready: its device has failed at a copy, and does nothing more for this process.
DEVICE_FAILED: Final = 6
#: Of a maker: the device has not so much memory left, or none for a context.
NO_ROOM: Final = 7
