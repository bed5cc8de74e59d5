"""A message's parts as a request, and the reply to what is none."""

from __future__ import annotations

from typing import NamedTuple

from kvcached_client.errors import RequestError
from kvcached_client.protocol.engine import ErrorReply, Request, decode_request, error_reply, salvage_id
from kvcached_client.protocol.fields import check_frames


class Decoded(NamedTuple):
    """A request with its frames."""

    request: Request
    frames: list[bytes]


def decode(parts: list[bytes]) -> Decoded:
    """A message's parts, at least one, as a request whose frames fit its verb.

    Raises:
        BadRequest: anything about it breaks the protocol.
    """
    request = decode_request(parts[0])
    frames = parts[1:]
    check_frames(request, frames)
    return Decoded(request, frames)


def refusal(parts: list[bytes], error: RequestError) -> ErrorReply:
    """The reply to what could not be decoded, addressed to the request that caused it where its id can be read."""
    return error_reply(salvage_id(parts[0]) if parts else 0, error)
