"""What the messages that are not whole or wait, and the replies that are not read, take; and who loses a connection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Final

from kvcached.server.connection import Connection

#: Of all connections: three of the largest messages. Beyond it the process, or the other user, that has most of them
#: loses its connection that has most.
HELD_BYTES_MAX: Final = 24 << 20
#: Of one user other than the daemon's own: more than one of the largest messages. Beyond it that user loses one.
USER_HELD_BYTES_MAX: Final = HELD_BYTES_MAX // 2


class HeldBytes:
    """The bytes that one socket holds for its connections.

    Attributes:
        total: of all of them.
    """

    def __init__(self) -> None:
        self.total = 0
        self._of_user: Counter[Hashable] = Counter()

    def count(self, connection: Connection, size_bytes: int) -> None:
        """A connection has so many now."""
        more = size_bytes - connection.counted_bytes
        connection.counted_bytes = size_bytes
        self.total += more
        if not connection.grants.is_own:
            user = connection.origin.user
            self._of_user[user] += more
            if not self._of_user[user]:
                del self._of_user[user]

    def is_beyond(self, connection: Connection) -> bool:
        """Whether a connection must go: all have too much, or those of this one's user."""
        return self.total > HELD_BYTES_MAX or self._of_user[connection.origin.user] > USER_HELD_BYTES_MAX

    def largest(self, connections: Iterable[Connection]) -> Connection:
        """The connection that goes: of a user beyond its share, else of all, the largest of the owner that has most."""
        over = {user for user, size in self._of_user.items() if size > USER_HELD_BYTES_MAX}
        candidates = [each for each in connections if not over or each.origin.user in over]
        held: Counter[Hashable] = Counter()
        for each in candidates:
            held[each.owner] += each.counted_bytes
        ((owner, _),) = held.most_common(1)
        return max((each for each in candidates if each.owner == owner), key=lambda each: each.counted_bytes)
