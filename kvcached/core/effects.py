"""What the core asks the world to do. The service carries effects out after each call, in order."""

from __future__ import annotations

from dataclasses import dataclass

from kvcached_client.types import SessionId


@dataclass(frozen=True, slots=True)
class SessionExpired:
    """It went silent or lost a member: tell the log, keep watching its processes for their death."""

    session: SessionId
    quarantined_slots: int


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """Nothing of the session is left: forget its connection and its processes."""

    session: SessionId
    freed_slots: int


Effect = SessionExpired | SessionEnded
