"""Whether a fetch from storage is quicker than computing, as earlier fetches say."""

from __future__ import annotations

#: What an observation weighs beside the next one.
_DECAY = 0.9
#: Refusals in a row after which one fetch is made anyway, lest an estimate of bad times stays for ever.
_REFUSALS_MAX = 32


class FetchEstimate:
    """Duration = latency + blocks x time per block: a least-squares line in which old fetches fade."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._refusals = 0

    def observe(self, blocks: int, took_us: int) -> None:
        """So many blocks came together, and took so long."""
        if blocks <= 0 or took_us < 0:
            return
        for name, value in (
            ("_weight", 1),
            ("_x", blocks),
            ("_y", took_us),
            ("_xx", blocks**2),
            ("_xy", blocks * took_us),
        ):
            setattr(self, name, getattr(self, name) * _DECAY + value)

    def predict_us(self, blocks: int) -> float | None:
        """How long so many blocks will take; None where none has been fetched yet."""
        if not self._weight:
            return None
        spread = self._weight * self._xx - self._x**2
        per_block = (self._weight * self._xy - self._x * self._y) / spread if spread > 1e-6 * self._xx else -1.0
        latency = (self._y - per_block * self._x) / self._weight
        if per_block < 0 or latency < 0:  # sizes too alike, or too noisy: a line through the origin
            per_block, latency = self._y / self._x, 0.0
        return latency + per_block * blocks

    def is_worth_it(self, blocks: int, tokens: int, prefill_tokens_per_s: float) -> bool:
        """Whether a fetch of blocks is predicted to end before their tokens would be computed.

        True where the engine has not said how fast it computes, where nothing is known, and once in a while.
        """
        predicted_us = self.predict_us(blocks)
        if not prefill_tokens_per_s or predicted_us is None or predicted_us <= tokens / prefill_tokens_per_s * 1e6:
            self._refusals = 0
            return True
        self._refusals += 1
        if self._refusals > _REFUSALS_MAX:
            self._refusals = 0
            return True
        return False
