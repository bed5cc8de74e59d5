"""Whether there is room for the pools of a start, which may have to drop pools that engines still map."""

from __future__ import annotations

import logging
from typing import Final

from kvcached.config.machine import memory_needed
from kvcached.config.schema import Config
from kvcached.memory.available import NotEnoughMemory, await_available, check_available
from kvcached.memory.dropped import DroppedMemory
from kvcached.recovery.inheritance import Inheritance

#: How long a start waits for memory that an earlier daemon had: systemd closes descriptors in the background, and the
#: kernel takes seconds to free tens of gigabytes.
_FREED_WAIT_S: Final = 10.0
#: How many processes the log names.
_NAMED_MAX: Final = 16

_log: Final = logging.getLogger(__name__)


async def check_memory(config: Config, inheritance: Inheritance, dropped: DroppedMemory, *, is_anything: bool) -> None:
    """Is there room for what is new? Memory that outlived an earlier daemon is taken already.

    Args:
        config: what is to be served.
        inheritance: the pools, made as files and not written yet where they are new.
        dropped: what this start has dropped. It counts as available, and is closed.
        is_anything: an earlier daemon had memory, some of which may be on its way back.

    Raises:
        NotEnoughMemory: there is no room.
    """
    pools = {name: memory.pool for name, memory in inheritance.devices.items()}
    new = [replica for replica in config.replica if (pool := pools[replica.name]) is not None and not pool.is_kept]
    is_host_new = config.host is not None and not inheritance.is_kept
    needed = config.model_copy(update={"replica": tuple(new), "host": config.host if is_host_new else None})
    stays = [replica for replica in config.replica if replica not in new]
    kept = config.model_copy(update={"replica": tuple(stays), "host": None if is_host_new else config.host})
    (size_bytes, names), (kept_bytes, _) = memory_needed(needed), memory_needed(kept)
    if grown_bytes := inheritance.grown_bytes:
        size_bytes, kept_bytes = size_bytes + grown_bytes, kept_bytes - grown_bytes
        names = " and ".join(filter(None, [names, "a larger host pool"]))
    purpose, patience_s = f"the configuration ({names})", _FREED_WAIT_S if is_anything else 0
    try:
        await await_available(size_bytes, purpose, patience_s, dropped.size_bytes, kept_bytes)
        _warn_of_processes(size_bytes, purpose, dropped)
    finally:
        dropped.close()


def _warn_of_processes(size_bytes: int, purpose: str, dropped: DroppedMemory) -> None:
    """Say who still has memory without which there is no room."""
    try:
        check_available(size_bytes, purpose)
    except NotEnoughMemory:
        pids = dropped.mapped_by()
        if pids:
            _log.warning(
                "%s needs %d bytes, and counts on the host pool that this start has dropped: its %d bytes are free "
                "when each process that maps it has connected again or ended (pid %s%s)",
                purpose, size_bytes, dropped.size_bytes, ", ".join(map(str, pids[:_NAMED_MAX])),
                f" and {len(pids) - _NAMED_MAX} more" if len(pids) > _NAMED_MAX else "",
            )  # fmt: skip
