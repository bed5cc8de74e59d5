"""Warnings of the daemon's thread: each kind once for each session, later ones for debugging only."""

from __future__ import annotations

import logging

from kvcached_client.errors import RequestError

#: Below vLLM's own logger, for its handlers and format.
log = logging.getLogger("vllm.kvcached")


class Warnings:
    """What was said since the last session began."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def new_session(self) -> None:
        """Say everything again."""
        self._told.clear()

    def refusal(self, error: RequestError) -> None:
        """The daemon has refused something."""
        self.once(f"the daemon refused: {error}", kind=error.code)

    def once(self, message: str, *, kind: str = "") -> None:
        """Log a warning, once for each kind of message."""
        level = logging.DEBUG if (kind or message) in self._told else logging.WARNING
        self._told.add(kind or message)
        log.log(level, "kvcached: %s", message)
