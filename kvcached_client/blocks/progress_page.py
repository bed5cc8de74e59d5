"""The format of a progress page: how far the loads of a shard are, told without a message.

The page is an array of 64-byte entries in shared memory, little-endian, with an eventfd for each::

     0  u64  transfer      the load that has the entry; grows from one to the next
     8  u32  layers_done   layers of every block of it that can be read
    12  u32  state         0 running, 1 done, 2 failed
    16       zero

A reader that waits for a layer of load T looks at the entry: with an earlier transfer T has not begun, with a later one
T is over. Otherwise the layer is there when `layers_done` is above it or the state is 1, and never comes when the state
is 2. Until then it waits for the eventfd. Writes become visible in program order (x86-64), and each event follows the
change that it tells of. The page alone decides; an event may be about a load that is long over.

Workers write it (`kvcached.memory.progress`), engines read it (`blocks.progress`).
"""

from __future__ import annotations

from typing import Final

from kvcached_client.types import PROGRESS_SLOTS

ENTRY_SIZE_BYTES: Final = 64
PAGE_SIZE_BYTES: Final = PROGRESS_SLOTS * ENTRY_SIZE_BYTES

STATE_RUNNING: Final = 0
STATE_DONE: Final = 1
STATE_FAILED: Final = 2
