"""Python's collector of cyclic garbage, as a daemon with a large index needs it: it looks only at what is new.

A full collection visits every object of the index: 0.84 s for 119,000 runs, during which nobody is answered, and every
quarter of the index that is replaced brings on another one. It finds nothing: a block that leaves the index is freed by
its last reference, and neither core nor service leaves cycles behind (`tests/daemon/test_garbage.py`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

#: More collections of the middle generation than a daemon will ever see.
_NEVER: Final = 1 << 30


@contextmanager
def only_young() -> Iterator[None]:
    """Within the block, only what is new is collected; what there is now is not even looked at."""
    new, middle, old = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(new, middle, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(new, middle, old)
        gc.unfreeze()
