"""Environment variables as values of the configuration: ``KVCACHED_REPLICA__0__SLOTS=4096``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any, Final

from kvcached.config_error import Location, dotted
from kvcached_client import failpoints

ENVIRONMENT_PREFIX: Final = "KVCACHED_"
#: Names the file itself, so it is no key of it.
CONFIG_VARIABLE: Final = "KVCACHED_CONFIG"
#: Variables that are no keys.
_OTHERS: Final = (CONFIG_VARIABLE, failpoints.VARIABLE, failpoints.LOG_VARIABLE)


def overlay_environment(settings: dict[str, Any], environment: Mapping[str, str]) -> dict[Location, str]:
    """Put every variable's value over `settings`. Returns where each went, and what it is called in messages."""
    overlays: dict[Location, str] = {}
    for name, value in sorted(environment.items()):
        if name.startswith(ENVIRONMENT_PREFIX) and name not in _OTHERS and value:
            location = _overlay(settings, _environment_location(name), _environment_value(value))
            overlays[location] = f"environment {name}"
    return overlays


def _environment_location(name: str) -> Location:
    """``KVCACHED_REPLICA__0__SLOTS`` → ("replica", 0, ("slots",))."""
    steps = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
    return tuple(int(step) if step.isdecimal() else step for step in steps)


def _environment_value(text: str) -> Any:  # noqa: ANN401 - any TOML value, which validation types
    """A variable as TOML would read it; what is no TOML value is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text


def _overlay(settings: dict[str, Any], location: Location, value: object) -> Location:
    """Put `value` at `location`, and say where it is. Without a way there it goes where validation will refuse it."""
    place: Any = settings
    for step in location[:-1]:
        if isinstance(place, dict) and isinstance(step, str):
            place = place.setdefault(step, {})
        elif isinstance(place, list) and isinstance(step, int) and step < len(place):
            place = place[step]
        else:
            place = None
    if not isinstance(place, dict):
        place, location = settings, (dotted(location),)
    place[str(location[-1])] = value
    return location
