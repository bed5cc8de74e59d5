"""Exit statuses of a process that makes device memory, which the daemon tells apart."""

from typing import Final

#: The device, or what is needed to reach it, is missing until somebody installs it or names another one.
MISSING: Final = 2
#: The driver refused, or is not there yet.
REFUSED: Final = 3
