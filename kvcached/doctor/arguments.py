"""An engine's command line, as `kvcached doctor` reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


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
        dashed = argument.startswith("--") or argument in short
        if dashed:
            head, equals, value = argument.partition("=")
            name = short.get(head) or head.removeprefix("--")
            key, dot, rest = name.partition(".")
            name = key.replace("_", "-") + dot + rest
            options[name] = value
            name = "" if equals else name
        elif name:
            options[name] = argument
            name = ""
        else:
            words.append(argument)
    return options, words
