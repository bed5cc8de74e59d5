"""How many bytes prefetches may bring from storage in a second, all together."""

from __future__ import annotations


class FetchBudget:
    """Grows with time up to the bytes of one second; may be overdrawn by the last prefetch that is admitted.

    Args:
        bytes_per_s: 0 = no limit.
    """

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._left_bytes = float(bytes_per_s)

    @property
    def is_spent(self) -> bool:
        """Whether a prefetch has to be refused."""
        return bool(self._bytes_per_s) and self._left_bytes <= 0

    def spend(self, size_bytes: int) -> None:
        """So much is going to be fetched."""
        self._left_bytes -= size_bytes

    def give_back(self, size_bytes: int) -> None:
        """So much of it will not be fetched after all."""
        self._left_bytes = min(self._left_bytes + size_bytes, float(self._bytes_per_s))

    def grow(self, passed_ms: int) -> None:
        """Time has passed."""
        self._left_bytes = min(self._left_bytes + self._bytes_per_s * passed_ms / 1000, float(self._bytes_per_s))
