"""What SGLang's command line has to say for kvcached. Without SGLang, for `kvcached doctor` asks as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

#: Version of SGLang that the tests run.
TESTED_VERSION: Final = "0.5.23"
OPTION: Final = "--hicache-storage-backend-extra-config"
#: What that option has to say.
EXTRA_CONFIG: Final[Mapping[str, object]] = {
    "backend_name": "kvcached",
    "module_path": "kvcached_client.sglang",
    "class_name": "KvcachedStorage",
    "interface_v1": 1,
    "hicache_storage_pass_prefix_keys": True,
}


class RefusedSetting(NamedTuple):
    """A setting of SGLang's with which it would not find what it stores.

    Attributes:
        group: SGLang's group of settings that it is in.
        name: its name there, from which that of the option follows.
        value: what it may not be; None = anything.
        why: what happens with it.
    """

    group: str
    name: str
    value: str | None
    why: str

    @property
    def option(self) -> str:
        """The option that sets it."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def words(self) -> str:
        """What is not served, and why."""
        return f"{self.option}{f' {self.value}' if self.value else ''}: {self.why}"

    def is_meant(self, value: object) -> bool:
        """Whether the setting is not served if it has this value. An option without a value has an empty text."""
        return value not in (None, False) and self.value in (None, value)


REFUSED_SETTINGS: Final = (
    RefusedSetting("spec", "speculative_algorithm", None, "speculative decoding is not served"),
    RefusedSetting(
        "memory",
        "hicache_write_policy",
        "write_back",
        "SGLang would store the end of a prompt before its beginning, which the daemon does not take, and never again",
    ),
    RefusedSetting(
        "memory",
        "hicache_host_memory_mode",
        "buffer_only",
        "SGLang would ask for pages without naming all those before them, and load none",
    ),
    RefusedSetting(
        "disagg",
        "disaggregation_decode_enable_offload_kvcache",
        None,
        "SGLang would not say which pages are before those that it stores, so that none would be stored",
    ),
)

#: When SGLang drops its pages, it ends itself if one of its threads is busy for ten seconds.
_DEADLINE_MS_MAX: Final = 2000


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The table `kvcached` in SGLang's ``--hicache-storage-backend-extra-config``.

    Attributes:
        run_dir: directory of the daemon's sockets.
        weights_version: any text; another one when weights change and their files do not show it.
        deadline_ms: limit for one call to the daemon.
        side_pools: serve models with host pools beside that of keys and values, whose outputs nobody has proven yet.
    """

    run_dir: str | None = None
    weights_version: str = ""
    deadline_ms: int = msgspec.field(default=1000)
    side_pools: bool = False


def read_settings(extra: Mapping[str, Any]) -> Settings:
    """The table `kvcached`, or its defaults.

    Raises:
        ValueError: it is not what kvcached takes.
    """
    try:
        settings = msgspec.convert(extra.get("kvcached", {}), Settings)
    except msgspec.ValidationError as error:
        raise ValueError(f"{OPTION}, kvcached: {error}") from error
    if not 1 <= settings.deadline_ms <= _DEADLINE_MS_MAX:
        raise ValueError(f"{OPTION}, kvcached: deadline_ms is {settings.deadline_ms}; give 1 to {_DEADLINE_MS_MAX}")
    return settings
