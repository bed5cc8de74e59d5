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
_REFUSED: Final = re.compile(
    r"(Expected (?P<what>.*)|Invalid enum value (?P<value>.*)) - at `\$\.(?P<field>\w+)(?P<item>.*)`"
)


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
    said = f"{found['value']} is not allowed" if found["what"] is None else f"expected {found['what'].replace('`', '')}"
    allowed = "" if found["item"] else _allowed(request, found["field"])
    fix = f"give {allowed}" if allowed else f"correct {argument}"
    return request_error(error.code, f"{argument} of {method_of(request)}: {said}", fix)


def _allowed(request: Header, name: str) -> str:
    """What a field of a request may be, in words; empty where its type alone does not say it."""
    from msgspec import inspect  # noqa: PLC0415 - takes a while, and only who has made a mistake needs it

    told = inspect.type_info(type(request))
    kinds = [each.type for each in told.fields if each.name == name] if isinstance(told, inspect.StructType) else []
    match kinds:
        case [inspect.LiteralType(values) | inspect.EnumType(cls=values)]:
            return f"one of {', '.join(repr(getattr(each, 'value', each)) for each in values)}"
        case [inspect.StrType(min_length=least, max_length=most)]:
            return f"text of {_between(least, most)} characters"
        case [inspect.BytesType(min_length=least, max_length=most)]:
            return f"{_between(least, most)} bytes"
        case [inspect.IntType(ge=least, le=most)]:
            return f"a whole number, {_between(least, most)}"
        case [inspect.FloatType(ge=least, le=most)]:
            return f"a number, {_between(least, most)}"
    return ""


def _between(least: float | None, most: float | None) -> str:
    if least == most and least is not None:
        return str(least)
    if least is None:
        return "of any size" if most is None else f"at most {most}"
    return f"at least {least}" if most is None else f"{least} to {most}"
