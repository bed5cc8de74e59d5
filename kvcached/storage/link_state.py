"""The states of the storage process, as the daemon sees it.

::

    detached ─▶ starting ─▶ ready ⇄ suspended        failing, or slow: nothing is begun until it answers again
        ▲          ▲          │
        │          │          ▼
        └───────── waiting ◀──┘                      dead: started again, after longer and longer pauses
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class LinkState(StrEnum):
    """The state of the storage process."""

    DETACHED = "detached"  #: it was not started, or an administrator has detached it
    STARTING = "starting"
    READY = "ready"
    SUSPENDED = "suspended"
    WAITING = "waiting"


LINK_TRANSITIONS: Final = frozenset(
    {
        (LinkState.DETACHED, LinkState.STARTING),
        (LinkState.STARTING, LinkState.READY),
        (LinkState.STARTING, LinkState.WAITING),
        (LinkState.STARTING, LinkState.DETACHED),
        (LinkState.READY, LinkState.SUSPENDED),
        (LinkState.READY, LinkState.WAITING),
        (LinkState.READY, LinkState.DETACHED),
        (LinkState.SUSPENDED, LinkState.READY),
        (LinkState.SUSPENDED, LinkState.WAITING),
        (LinkState.SUSPENDED, LinkState.DETACHED),
        (LinkState.WAITING, LinkState.STARTING),
        (LinkState.WAITING, LinkState.DETACHED),
    }
)
