"""Messages of an engine that comes back to a daemon which was started anew: its pool has outlived the daemon before.

The scheduler says `Rejoin` instead of `Hello`, then `Declare` for each lease that it goes on with, then `DeclareOver`.
Until then no slot of its pool is granted to anybody.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvcached_client.protocol.fields import Count, Header, Id, RequestName, Secret

# --- requests -------------------------------------------------------------------------------------------------------


class Rejoin(Header, frozen=True, kw_only=True, tag="rejoin"):
    """Go on with a session that an earlier daemon has opened. Frames: none. Answered by `Welcome`."""

    version_min: Id
    version_max: Id
    member: Secret  #: from the attach socket: says which process asks
    session: Id  #: as the earlier daemon called it
    daemon_epoch: Id  #: of the earlier daemon
    token: Secret  #: of the session
    layout: Annotated[str, msgspec.Meta(max_length=64)]  #: fingerprint of what the engine has mapped
    namespace: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]  #: root of the keys of what it holds
    fence: Id  #: the highest that the session has named and that has not signalled; 0 where all have


class Declare(Header, frozen=True, kw_only=True, tag="declare"):
    """A request of the engine holds a lease. Frames: keys; the slots of these blocks; its exclusive slots in order."""

    epoch: Id
    request: RequestName  #: the engine's own id of the request
    tokens: Count  #: of its prompt
    hit: Count  #: blocks that it was promised: those beyond the keys were still loading


class DeclareOver(Header, frozen=True, kw_only=True, tag="declare_over"):
    """All is declared: slots that no lease holds are free, once the fence of `Rejoin` has signalled. Frames: none."""

    epoch: Id


# --- replies --------------------------------------------------------------------------------------------------------


class Declared(Header, frozen=True, kw_only=True, tag="declared"):
    """Answer to `Declare`."""

    lease: Id  #: as it is called from now on


class DeclareEnded(Header, frozen=True, kw_only=True, tag="declare_ended"):
    """Answer to `DeclareOver`."""

    freed: Count  #: slots that are free now; 0 while the fence of `Rejoin` has not signalled
