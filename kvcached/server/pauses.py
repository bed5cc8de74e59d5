"""From whom the RPC socket does not read for a moment: processes much of whose bytes was read for nothing.

Without pauses, a process that sends messages beyond the limits on and on takes a processor of the machine, and those
that are served wait for it. The same holds for requests that are refused, whatever they are refused for, and for
connections that are cut off.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final

from kvcached.server.connection import Connection
from kvcached_client.errors import ErrorCode, Fault
from kvcached_client.protocol.engine import ErrorReply

#: In the long run, refused bytes of one process are read no faster: about a hundredth of a processor's time.
REFUSED_BYTES_PER_S: Final = 32 << 20
#: What a refused request counts as at least: small ones cost the time of a request, not that of their bytes. So a
#: process gets a thousand refusals a second in the long run, for less than a tenth of a processor.
REFUSED_REQUEST_BYTES: Final = 32 << 10
#: Refusals that the daemon's state is no reason for: a full pool, or a drain, is nothing that a peer does on purpose.
_PEERS_FAULTS: Final = frozenset({Fault.CALLER, Fault.EPOCH})
#: A connection that is cut off counts as so many: the next one costs its handshake, and its process begins anew.
CUT_OFF_BYTES: Final = 4 << 20
#: Of one process, without a pause: a pause for each `recv` would be many timers.
REFUSED_BYTES_MIN: Final = 4 << 20
#: Processes of which it is known how much was refused; of others, nothing was.
OWNERS_MAX: Final = 1024


def is_for_nothing(refusal: ErrorReply) -> bool:
    """Whether a request was refused that its peer need not have sent.

    A client cannot know which prompts the daemon has forgotten: it names one, and sends all keys if it is refused.
    """
    return refusal.fault in _PEERS_FAULTS and refusal.code != ErrorCode.UNKNOWN_PREFIX


class Pauses:
    """The processes that are paused, in the running event loop. One whose pid is not visible here is a connection.

    Args:
        changed: called when the pause of a connection's process begins, and when it is over.
    """

    def __init__(self, changed: Callable[[Hashable], None]) -> None:
        self._changed = changed
        self._timers: dict[Hashable, asyncio.TimerHandle] = {}
        #: Bytes of a process that came for nothing since its last pause; the one that was refused last comes last.
        self._refused: OrderedDict[Hashable, int] = OrderedDict()

    def __contains__(self, connection: Connection) -> bool:
        return connection.owner in self._timers

    def refuse(self, connection: Connection, size_bytes: int) -> None:
        """So many bytes of a connection were read for nothing. Many of them pause its process."""
        owner = connection.owner
        refused_bytes = self._refused.pop(owner, 0) + size_bytes
        if refused_bytes >= REFUSED_BYTES_MIN and connection not in self:
            pause_s = refused_bytes / REFUSED_BYTES_PER_S
            self._timers[owner] = asyncio.get_running_loop().call_later(pause_s, self._end, owner)
            self._changed(owner)
            return
        self._refused[owner] = refused_bytes
        if len(self._refused) > OWNERS_MAX:
            self._refused.popitem(last=False)

    def close(self) -> None:
        """No pause ends any more."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _end(self, owner: Hashable) -> None:
        del self._timers[owner]
        self._changed(owner)
