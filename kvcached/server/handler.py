"""What the RPC server needs of whoever serves its requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvcached_client.errors import RequestError
from kvcached_client.protocol.engine import Header, Request


class Answer(Protocol):
    """What the service answers with: a header and the frames that follow it."""

    @property
    def header(self) -> Header:
        """The reply."""

    @property
    def frames(self) -> tuple[bytes, ...]:
        """Its frames, in the verb's order."""


class Handler(Protocol):
    """Who serves requests."""

    def submit(self, peer: bytes, request: Request, frames: list[bytes], respond: Callable[[Answer], None]) -> None:
        """Serve one request; call `respond` once if it wants a reply, now or later."""

    def refused(self, error: RequestError) -> RequestError:
        """Take note of a message that was no request."""

    def count(self, what: str) -> None:
        """Take note of something that happened.

        ``dropped_replies``: the peer was gone. ``disconnects``: a connection that was served has ended, for any reason.
        """
