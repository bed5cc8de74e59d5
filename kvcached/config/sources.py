"""Where a configuration comes from: a TOML file, and environment variables over it."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvcached.config.problems import ConfigError, Location, Problem, dotted
from kvcached_client import failpoints

#: A thousand times what a configuration of many replicas has. A device has no end.
CONFIG_BYTES_MAX: Final = 16 << 20


def read_config_file(path: Path) -> tuple[str, dict[str, Any]]:
    """The text of a TOML file, or of a pipe that ends, and what it says.

    Raises:
        ConfigError: it cannot be read, or is no TOML.
    """
    try:
        text = _read(path)
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _unreadable(path, f"is no TOML: {error}", "see configs/ for examples") from None
    except RecursionError:
        raise _unreadable(path, "is nested too deeply", "see configs/ for examples") from None
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else str(error)
        raise _unreadable(path, f"cannot be read: {what}", "name a TOML file") from None


def _read(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(CONFIG_BYTES_MAX + 1)
    if len(data) > CONFIG_BYTES_MAX:
        raise ValueError(f"it has more than {CONFIG_BYTES_MAX} bytes")
    return data.decode().removeprefix("\ufeff")  # a byte order mark, with which some editors begin a file


def _unreadable(path: Path, what: str, fix: str) -> ConfigError:
    return ConfigError([Problem(str(path), "file", "", what, fix)])


ENVIRONMENT_PREFIX: Final = "KVCACHED_"
#: Names the file itself, so it is no key of it.
CONFIG_VARIABLE: Final = "KVCACHED_CONFIG"
#: Variables that are no keys.
_OTHERS: Final = (
    *(CONFIG_VARIABLE, failpoints.VARIABLE, failpoints.LOG_VARIABLE),
    *("KVCACHED_ENDPOINT", "KVCACHED_SERVER_KEY", "KVCACHED_KEY_FILE"),  # of commands, for daemons on other machines
    *("KVCACHED_TAG", "KVCACHED_COMPILE"),  # of configs/compose.yaml and of the build (setup.py)
)
#: What Kubernetes puts into every container of a namespace that has a service called kvcached, or kvcached-metrics:
#: KVCACHED_SERVICE_HOST, KVCACHED_SERVICE_PORT_HTTP, KVCACHED_PORT_8000_TCP_ADDR. A key of a table has `__` in it.
_SERVICE_LINK: Final = re.compile(
    r"KVCACHED(_(?!_)[A-Z0-9]+)*?_(SERVICE_(HOST|PORT(_(?!_)[A-Z0-9]+)*)|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
#: KVCACHED_PORT itself is told apart by its value.
_SERVICE_ADDRESS: Final = re.compile(r"(tcp|udp|sctp)://[^/]+:[0-9]+")


def overlay_environment(settings: dict[str, Any], environment: Mapping[str, str]) -> dict[Location, str]:
    """Put every variable's value over `settings`. Returns where each went, and what it is called in messages.

    Raises:
        ConfigError: the name of one is no text, so that it can be no key.
    """
    overlays: dict[Location, str] = {}
    for name, value in sorted(environment.items()):
        is_ours = name.startswith(ENVIRONMENT_PREFIX) and name not in _OTHERS
        if is_ours and value and not _is_service_link(name, value):
            _check_is_text(name)
            location = _overlay(settings, _environment_location(name), _environment_value(value))
            overlays[location] = f"environment {name}"
    return overlays


def _check_is_text(name: str) -> None:
    """Refuse a name with bytes that are no UTF-8, which Python has as characters that nothing can write."""
    try:
        name.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(name).decode("utf-8", "backslashreplace")
        fix = "unset it, or give it the name of a key"
        raise ConfigError([Problem(f"environment {shown}", "name", "", "is not UTF-8", fix)]) from None


def _is_service_link(name: str, value: str) -> bool:
    is_address = name.endswith("_PORT") and _SERVICE_ADDRESS.fullmatch(value)
    return bool(is_address or _SERVICE_LINK.fullmatch(name))


def _environment_location(name: str) -> Location:
    """``KVCACHED_REPLICA__0__SLOTS`` → ("replica", 0, ("slots",))."""
    steps = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
    return tuple(int(step) if step.isdecimal() else step for step in steps)


def _environment_value(text: str) -> Any:  # noqa: ANN401 - any TOML value, which validation types
    """A variable as TOML would read it; what is no TOML value, or too deep or too long for one, is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, KeyError, RecursionError):
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
