"""Blocks of prompts from the daemon's storage: asked for when a request arrives, waited for before it is admitted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, TypeAlias

from kvcached_client.errors import KvcachedError
from kvcached_client.keys import KeyChain, Tokens
from kvcached_client.prefetch import PendingPrefetch

#: A request waits that long at most, whatever the daemon is configured to.
DEADLINE_MS: Final = 5000
#: A daemon without storage is not asked again for that long.
PAUSE_S: Final = 5.0
#: How much of the prefill rate is the last step's.
_WEIGHT: Final = 0.25

#: Asks for a prompt's blocks, with the engine's prefill rate; None where there is no daemon.
Begin: TypeAlias = Callable[[KeyChain, float], PendingPrefetch | None]

_log = logging.getLogger("llama_engine")


class Storage:
    """Asks for prompts, as long as there is storage.

    Args:
        chain: makes a prompt's keys.
        begin: sends the request; may raise KvcachedError.
    """

    def __init__(self, chain: Callable[[Tokens], KeyChain], begin: Begin) -> None:
        self._chain = chain
        self._begin = begin
        self._not_before_s = 0.0

    def fetch(self, prompt: Tokens, tokens_per_s: float) -> Fetch | None:
        """Have a prompt's blocks brought; None where nothing is to be waited for."""
        if time.monotonic() < self._not_before_s:
            return None
        try:
            pending = self._begin(self._chain(prompt), tokens_per_s)
        except KvcachedError as error:
            _log.info("nothing from storage: %s", error)
            return None
        return None if pending is None else Fetch(pending, self._note)

    def _note(self, reason: str) -> None:
        if reason == "unavailable":
            self._not_before_s = time.monotonic() + PAUSE_S


class Fetch:
    """A prompt's blocks on their way. The daemon says when they are to be waited for no more."""

    def __init__(self, pending: PendingPrefetch, note: Callable[[str], None]) -> None:
        self._pending = pending
        self._note = note

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to wait for."""
        try:
            return self._pending.is_over
        except KvcachedError:
            return True

    def wait(self) -> None:
        """Return when there is nothing to wait for. Once only."""
        try:
            self._note(self._pending.result().reason)
        except KvcachedError as error:
            _log.info("not waiting for storage any more: %s", error)


class PrefillRate:
    """How many tokens a second the engine computes where it computes many at once; 0 until it has."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """A step with prefill."""
        rate = tokens / max(seconds, 1e-6)
        self.tokens_per_s += (rate - self.tokens_per_s) * (_WEIGHT if self.tokens_per_s else 1.0)
