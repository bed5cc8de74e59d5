"""Mistakes in a configuration: one `Problem` each, with the place, the value and a fix.

The standard library's TOML reader does not report lines, so the line of a key is looked up in the file's text. The
lookup knows tables, arrays of tables and ``key = value``. For a key that it does not find, it returns the line of the
table around the key.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

#: The path of a value in a configuration: ("replica", 0, "slots").
Location = tuple[str | int, ...]

_VALUE_LENGTH_MAX = 80
_TABLE = re.compile(r"^\s*(\[\[?)\s*([\w\-.]+)\s*\]")
_KEY = re.compile(r"^\s*([\w\-]+)\s*=")
_WHAT = {
    "greater_than_equal": "is too small",
    "less_than_equal": "is too large",
    "model_type": "is no table",
    "path_type": "is no path",
    "is_instance_of": "is no path",  # the only keys whose type is a class are paths
    "multiple_of": "is no multiple",
    "literal_error": "is none of the choices",
    "string_pattern_mismatch": "has characters that are not allowed",
    "string_too_long": "is too long",
    "string_too_short": "is too short",
    "tuple_type": "is no array",
}
#: New names of tables that were renamed.
_NEW_NAMES = {"attached": "offload"}
#: What the names of secrets have in them. In the table of a backend's settings, any key may be for one.
_SECRETS = re.compile("password|secret|token|key", re.IGNORECASE)
_MAY_HOLD_SECRETS = ("storage", "settings")
#: Keys with this suffix name the file of a secret, and somebody may have written the secret itself there.
_FILE_SUFFIX = "_file"
#: What certainly is a path begins so. Passwords, and keys in hex digits, do not.
_PATHS_BEGIN = ("/", "./", "../")
_UNITS = {"_ms": "milliseconds", "_tokens": "tokens"}
#: Keys with these suffixes are sizes (`kvcached.config.tables.SIZE`).
_SIZE_SUFFIXES = ("_bytes", "_bytes_per_s")
_BINARY_UNITS = ("", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: its source, the key, the value as written ("" = no value), what is wrong, and what to do."""

    source: str
    key: str
    value: str
    what: str
    fix: str

    def __str__(self) -> str:
        assignment = f"{self.key} = {self.value}" if self.value else self.key
        return f"{self.source}: {assignment}: {self.what}; {self.fix}"


class ConfigError(Exception):
    """The configuration cannot be used, and nothing was started.

    Attributes:
        problems: all mistakes that were found; at least one.
    """

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


def mistake(
    what: str, fix: str, at: Location = (), value: object = None, *, is_secret: bool = False
) -> PydanticCustomError:
    """The error that a validator raises, with its own fix.

    The validator of a table passes the path of the key at fault within that table, and its value. The validator of a
    key passes neither. A value that may contain a secret is not repeated.
    """
    told = {"what": what, "fix": fix, "at": at, "value": value, "is_secret": is_secret}
    return PydanticCustomError("kvcached", "{what}", told)


@dataclass(frozen=True, slots=True)
class Places:
    """Where a configuration's values come from. All instances are equal: two files may hold one configuration.

    Attributes:
        path: the file's path; "" for a configuration that was not read from a file.
        lines: the line of each location in the file.
        overlays: for each value from elsewhere, location → name of the option or variable.
        written: all values as they were written.
    """

    path: str = field(default="", compare=False)
    lines: Mapping[Location, int] = field(default_factory=dict, compare=False)
    overlays: Mapping[Location, str] = field(default_factory=dict, compare=False)
    written: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def source(self, location: Location) -> str:
        """The option, variable or line that a value, or the table around it, comes from."""
        parents = [location[:end] for end in range(len(location), 0, -1)]
        overlay = next((self.overlays[parent] for parent in parents if parent in self.overlays), None)
        if overlay is not None:
            return overlay
        line = next((self.lines[parent] for parent in parents if parent in self.lines), None)
        return self.path if line is None else f"{self.path}:{line}"

    def problem(self, location: Location, value: object, what: str, fix: str) -> Problem:
        """A mistake at a location; `value` is None if there is no value, or if it is a table."""
        is_told = value is not None and not self.may_be_secret(location, value)
        return Problem(
            self.source(location), dotted(location) or "configuration", _written(value) if is_told else "", what, fix
        )

    def may_be_secret(self, location: Location, value: object) -> bool:
        """Whether a value stands where the file of a secret is named, and may be that secret: no message repeats it."""
        if not location or not str(location[-1]).endswith(_FILE_SUFFIX):
            return False
        found: Any = self.written
        for step in location:
            found = found.get(step) if isinstance(found, Mapping) else None
        text = value if found is None else found
        return not isinstance(text, str) or not text.startswith(_PATHS_BEGIN)


def problems_of(error: ValidationError, model: type[BaseModel], places: Places, inside: Location = ()) -> list[Problem]:
    """The mistakes that validation found.

    Args:
        error: the error that `model` raised.
        model: the root of the configuration, or of its table `inside`.
        places: where the values come from.
        inside: the table that `model` describes.
    """
    every = error.errors(include_url=False)
    return [_problem(each, model, places, inside) for each in every if not _is_consequence(each, every)]


def _is_consequence(details: ErrorDetails, every: list[ErrorDetails]) -> bool:
    """Whether an array is too short only because tables in it have mistakes of their own: these do not count in it."""
    place = details["loc"]
    return details["type"] == "too_short" and any(
        other["loc"][: len(place)] == place and len(other["loc"]) > len(place) for other in every
    )


def _problem(details: ErrorDetails, model: type[BaseModel], places: Places, inside: Location) -> Problem:
    context = details.get("ctx", {})
    location = (*details["loc"], *context.get("at", ()))
    what, fix = _explain(details, model, location)
    value = context["value"] if context.get("at") else details["input"]
    is_written = details["type"] != "missing" and not isinstance(value, dict | BaseModel)
    is_written = is_written and not context.get("is_secret")
    place = (*inside, *location)
    if details["type"] == "extra_forbidden":
        is_written = is_written and not _may_be_secret(place, value)
    return places.problem(place, value if is_written else None, what, fix)


def _may_be_secret(place: Location, value: object) -> bool:
    """Whether the value of an unknown key is not repeated: a password is also one under a wrong name."""
    is_named_so = any(_SECRETS.search(str(step)) for step in place)
    return is_named_so or place[: len(_MAY_HOLD_SECRETS)] == _MAY_HOLD_SECRETS or isinstance(value, list)


def _explain(details: ErrorDetails, model: type[BaseModel], location: Location) -> tuple[str, str]:
    """What is wrong, and what to do."""
    context = details.get("ctx", {})
    if details["type"] == "kvcached":
        return str(context["what"]), str(context["fix"])
    table, schema = _schema_at(model, location)
    if details["type"] == "extra_forbidden":
        known = sorted(table.get("properties", {}))
        key = str(location[-1])
        near = difflib.get_close_matches(_NEW_NAMES.get(key, key), known, n=1)
        return "there is no such key", f"did you mean {near[0]}?" if near else f"the keys here are {', '.join(known)}"
    expected = expectation(str(location[-1]), schema)
    if details["type"] == "missing":
        return "is missing", f"add it: {expected}"
    what = _WHAT.get(details["type"], details["msg"].removeprefix("Input "))
    return what, f"give {expected}"


def _schema_at(model: type[BaseModel], location: Location) -> tuple[dict[str, Any], dict[str, Any]]:
    """The JSON schemas of the table that holds `location`, and of the key itself ({} for an unknown one)."""
    root = model.model_json_schema()
    schema: dict[str, Any] = root
    table: dict[str, Any] = root
    for step in location:
        table = schema
        schema = schema.get("items", {}) if isinstance(step, int) else schema.get("properties", {}).get(step, {})
        schema = resolved(schema, root)
    return table, schema


def resolved(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """A schema with its reference resolved, and with the one choice besides null in place of the choices."""
    choices = [choice for choice in schema.get("anyOf", []) if choice.get("type") != "null"]
    if choices:
        schema = {**schema, **choices[0]}
    if reference := schema.get("$ref"):
        definition: dict[str, Any] = root["$defs"][reference.rsplit("/", 1)[-1]]
        return definition
    return schema


def expectation(key: str, schema: Mapping[str, Any]) -> str:
    """The values that a key accepts, in words: "an integer from 100 to 60000 (milliseconds)"."""
    if "enum" in schema:
        return "one of " + ", ".join(f'"{choice}"' for choice in schema["enum"])
    if "const" in schema:
        return f'"{schema["const"]}"'
    if schema.get("type") == "integer":
        return _expected_number(key, schema)
    if schema.get("type") != "string":
        items = {"integer": "integers", "string": "text"}.get(schema.get("items", {}).get("type", ""), "tables")
        return {"array": f"an array of {items}", "boolean": "true or false", "object": "a table"}[schema["type"]]
    if schema.get("format") == "path":
        return "a path"
    text = f"text of {schema['maxLength']} characters at most," if "maxLength" in schema else "text"
    return f"{text} matching {schema['pattern']}" if "pattern" in schema else text.rstrip(",")


def _expected_number(key: str, schema: Mapping[str, Any]) -> str:
    is_size = key.endswith(_SIZE_SUFFIXES)
    low, high, multiple = (
        _written_size(schema[name]) if is_size and name in schema else schema.get(name)
        for name in ("minimum", "maximum", "multipleOf")
    )
    step = f", a multiple of {multiple}" if multiple is not None else ""
    if is_size:
        return f'a size from {low} to {high}{step}: bytes, or text as "64GiB"'
    unit = next((f" ({unit})" for suffix, unit in _UNITS.items() if key.endswith(suffix)), "")
    return f"an integer from {low} to {high}{unit}{step}"


def _written_size(size_bytes: int) -> str:
    """A size in the largest unit that represents it exactly: 64TiB, 4KiB, 70368744177665."""
    power = 0
    while size_bytes and not size_bytes % 1024 and power + 1 < len(_BINARY_UNITS):
        size_bytes, power = size_bytes // 1024, power + 1
    return f"{size_bytes}{_BINARY_UNITS[power]}"


def dotted(location: Location) -> str:
    """A location in text: ``replica[0].slots``."""
    text = ""
    for step in location:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def _written(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _VALUE_LENGTH_MAX else f"{text[:_VALUE_LENGTH_MAX]}…"


def key_lines(text: str) -> dict[Location, int]:
    """The line, counted from 1, of every table and key that the lookup knows."""
    lines: dict[Location, int] = {}
    counts: dict[Location, int] = {}
    table: Location = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _TABLE.match(line):
            table = _table_location(header[2].split("."), counts, is_array=header[1] == "[[")
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            lines.setdefault((*table, key[1]), number)
    return lines


def _table_location(names: list[str], counts: dict[Location, int], *, is_array: bool) -> Location:
    """The location of a table header; an array of tables in its path stands for the array's last table."""
    location: Location = ()
    for name in names[:-1]:
        location = (*location, name)
        if location in counts:
            location = (*location, counts[location] - 1)
    location = (*location, names[-1])
    if is_array:
        counts[location] = counts.get(location, 0) + 1
        location = (*location, counts[location] - 1)
    return location
