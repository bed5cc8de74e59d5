"""Errors about fields of a request, in the words of the SDK: the method that was called, and its argument."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from kvcached_client.errors import BadRequest, ErrorCode, RequestError, request_error
from kvcached_client.protocol.fields import Header

#: Methods with another name than their message.
_METHODS: Final[Mapping[str, str]] = {
    "hello": "connect",
    "hello_offload": "connect",
    "declare": "rejoin",
    "load": "wait_loaded",
    "heartbeat": "signal_fence",
    "transfer_done": "store or load",
}
#: Arguments with another name than their field.
_ARGUMENTS: Final[Mapping[tuple[str, str], str]] = {
    ("acquire", "reserve"): "reserve_tokens",
    **{("hello_offload", name): f"layout.{name}" for name in ("block_size", "shards", "block_bytes", "fingerprint")},
}
#: How a field is refused: what is expected, maybe what came, and the field.
_REFUSED: Final = re.compile(r"Expected (?P<what>.*) - at `\$\.(?P<field>\w+)(?P<item>.*)`")


def method_of(request: Header) -> str:
    """The method that sends a request."""
    verb = str(request.__struct_config__.tag)
    return _METHODS.get(verb, verb)


def about_argument(request: Header, error: RequestError) -> RequestError:
    """The daemon's refusal of a field as one of the argument; every other error as it is."""
    found = _REFUSED.fullmatch(error.message)
    if not isinstance(error, BadRequest) or error.code is not ErrorCode.MALFORMED or found is None:
        return error
    verb = str(request.__struct_config__.tag)
    argument = _ARGUMENTS.get((verb, found["field"]), found["field"]) + found["item"]
    what = found["what"].replace("`", "")
    return request_error(error.code, f"{argument} of {method_of(request)}: expected {what}", f"correct {argument}")
