from __future__ import annotations

from pathlib import Path

import pytest

from kvcached.config.problems import ConfigError
from kvcached.config.schema import load_config
from kvcached.storage.disk.directory import validated

OFFLOAD = "[host]\nsize_bytes = {size}\nslab_bytes = {slab}\n\n[offload]\n"


def load(tmp_path: Path, size: str, slab: str = '"1MiB"', **environment: str) -> tuple[int, int]:
    path = tmp_path / "kvcached.toml"
    path.write_text(OFFLOAD.format(size=size, slab=slab))
    host = load_config(path, environment=environment).host
    assert host is not None
    return host.size_bytes or 0, host.slab_bytes


@pytest.mark.parametrize(
    ("size", "expected"),
    [('"64GiB"', 64 << 30), ('"512 MiB"', 512 << 20), ('"1GB"', 10**9), ('"1.5GiB"', 3 << 29), ("8388608", 8 << 20)],
)
def test_config_takes_sizes_with_a_unit(size: str, expected: int, tmp_path: Path) -> None:
    """A size in bytes may be written with its unit; a plain integer is bytes."""
    assert load(tmp_path, size) == (expected, 1 << 20)


def test_config_takes_sizes_from_the_environment(tmp_path: Path) -> None:
    """A variable's size may have a unit, too."""
    assert load(tmp_path, "1", KVCACHED_HOST__SIZE_BYTES="2GiB")[0] == 2 << 30


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ('"64 apples"', 'host.size_bytes = "64 apples": is no size; give bytes, or a number with its unit'),
        ('"-1GiB"', 'host.size_bytes = "-1GiB": is no size'),
        ('"65TiB"', "is too large; give a size from 1 to 64TiB: bytes, or text"),
        ("1.5", "host.size_bytes = 1.5: should be a valid integer; give a size from 1 to 64TiB"),
    ],
)
def test_config_refuses_what_is_no_size(size: str, expected: str, tmp_path: Path) -> None:
    """A size that cannot be read, or is out of range, is told with its line and the limits in the same units."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, size)

    assert f"kvcached.toml:2: {expected}" in str(caught.value) or expected in str(caught.value)


def test_disk_settings_take_sizes_with_a_unit(tmp_path: Path) -> None:
    """The disk backend's capacity and free space may be written with their units."""
    settings = validated({"directory": tmp_path, "capacity_bytes": "64GiB", "free_space_floor_bytes": "1GiB"})

    assert (settings.capacity_bytes, settings.free_space_floor_bytes) == (64 << 30, 1 << 30)
