"""Messages about the tier below the host pool: blocks that are to be brought from it, and what people do with it."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from kvcached_client.protocol.fields import Count, Header, Id

#: Ten minutes: whoever waits for longer asks again.
PREFETCH_DEADLINE_MS_MAX: Final = 600_000

#: When a prefetch is answered: at once; when all has come that will; or then, but after the configured time at the
#: latest, which grows with the prompt.
StopPolicy = Literal["best_effort", "wait_complete", "timeout"]
StorageAction = Literal["status", "attach", "detach", "clear"]


class Prefetch(Header, frozen=True, kw_only=True, tag="prefetch"):
    """Bring a prompt's blocks from storage into the host pool. Frames: keys of its full blocks."""

    epoch: Id = 0  #: of the device pool; says nothing in offload mode
    tokens: Count  #: length of the prompt; at most tokens - 1 are looked for unless `full`
    full: bool = False
    stop: StopPolicy = "timeout"
    deadline_ms: Annotated[int, msgspec.Meta(ge=0, le=PREFETCH_DEADLINE_MS_MAX)] = PREFETCH_DEADLINE_MS_MAX
    prefill_tokens_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0  #: of the engine; 0 = not known, always fetch


class StorageControl(Header, frozen=True, kw_only=True, tag="storage_control"):
    """What storage does; start it, end it, or forget all that it holds. Needs no session. Frames: none."""

    action: StorageAction = "status"


# --- replies --------------------------------------------------------------------------------------------------------


class Prefetched(Header, frozen=True, kw_only=True, tag="prefetched"):
    """Answer to `Prefetch`."""

    blocks: Id  #: leading blocks of the prompt that were in the index, or have come; what a match finds may be fewer
    fetched: Id  #: blocks that have come from storage
    is_over: bool  #: nothing more will come; false where nobody waited for the rest
    reason: str  #: why it is over, or "waiting"


class StorageReport(Header, frozen=True, kw_only=True, tag="storage_report"):
    """Answer to `StorageControl`."""

    backend: str  #: "" = none is configured
    state: str  #: detached, starting, ready, read_only, suspended, waiting
    why: str  #: the last failure, or why it takes no blocks; "" = there was none
    backup: str  #: which blocks are written: every, second_sighting, on_eviction, never
    restarts: Id
    blocks: int  #: that it holds; -1 where the backend cannot tell, as in the two below
    size_bytes: int
    capacity_bytes: int
    counters: dict[str, int]
