"""The engine's own blocks in attached mode: which are free, and who holds the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvcached_client.errors import ErrorCode, NoCapacity


class BlockPool:
    """Blocks by number, with a count of holders for each: its request, and every copy that reads or writes it.

    Args:
        blocks: how many there are.
    """

    def __init__(self, blocks: int) -> None:
        self._free = deque(range(blocks))
        self._holders = [0] * blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Blocks with one holder.

        Raises:
            NoCapacity: there are not so many; none was taken.
        """
        if count > len(self._free):
            raise NoCapacity(
                ErrorCode.NO_CAPACITY,
                f"{count} blocks wanted, {len(self._free)} of {len(self._holders)} are free",
                "end a request first",
            )
        taken = [self._free.popleft() for _ in range(count)]
        self.hold(taken)
        return taken

    def hold(self, blocks: Sequence[int]) -> None:
        """One more holder for each."""
        for block in blocks:
            self._holders[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """One holder less for each; those without any are free."""
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)
