"""Frames ⇄ typed messages. Whatever a peer sends, the outcome is a request or one typed error."""

from __future__ import annotations

from typing import NamedTuple

from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.frames import check_frames
from kvcached_client.protocol import (
    FRAME_COUNT_MAX,
    ErrorReply,
    Request,
    decode_request,
    error_reply,
    salvage_id,
)


class Decoded(NamedTuple):
    """A request with its frames."""

    request: Request
    frames: list[bytes]


def decode(parts: list[bytes]) -> Decoded:
    """A message's parts as a request whose frames fit its verb.

    Raises:
        BadRequest: anything about it breaks the protocol.
    """
    if not 1 <= len(parts) <= FRAME_COUNT_MAX:
        raise request_error(
            ErrorCode.BAD_FRAMES,
            f"a message of {len(parts)} parts",
            f"a header and at most {FRAME_COUNT_MAX - 1} frames",
        )
    request = decode_request(parts[0])
    frames = parts[1:]
    check_frames(request, frames)
    return Decoded(request, frames)


def refusal(parts: list[bytes], error: RequestError) -> ErrorReply:
    """The reply to what could not be decoded, addressed to the request that caused it where its id can be read."""
    return error_reply(salvage_id(parts[0]) if parts else 0, error)
