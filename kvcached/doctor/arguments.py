"""An engine's command line, as `kvcached doctor` reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def read_arguments(arguments: Sequence[str], short: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Options and words.

    Args:
        arguments: as a shell passes them.
        short: names of options that begin with one dash.

    Returns:
        The options' values by name, without the dashes before it and with dashes in it; "" for one without a value.
        Then what belongs to no option.
    """
    options: dict[str, str] = {}
    words: list[str] = []
    name = ""
    for argument in arguments:
        head, equals, value = argument.partition("=")
        key, dot, rest = head.partition(".")
        if argument.startswith("--") or key in short:
            name = (short.get(key) or key.removeprefix("--").replace("_", "-")) + dot + rest
            options[name] = value
            name = "" if equals else name
        elif name:
            options[name] = argument
            name = ""
        else:
            words.append(argument)
    return options, words


def nested(options: Mapping[str, str], name: str) -> dict[str, Any]:
    """The fields of an option that are written behind dots, as vLLM reads them: each dot is a step into an object.

    Args:
        options: as `read_arguments` gives them.
        name: of the option.

    Returns:
        The object that the option would be as JSON; values that are no JSON are text.
    """
    found: dict[str, Any] = {}
    for key, value in options.items():
        head, *path = key.split(".")
        if head != name or not path:
            continue
        *steps, last = path
        place = found
        for step in steps:
            if not isinstance(place.get(step), dict):
                place[step] = {}
            place = place[step]
        read, before = _read(value), place.get(last)
        place[last] = {**before, **read} if isinstance(before, dict) and isinstance(read, dict) else read
    return found


def _read(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
