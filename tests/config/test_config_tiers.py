"""The configuration of the host tier and of offload mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcached.config import tables
from kvcached.config.problems import ConfigError
from kvcached.config.schema import load_config
from kvcached.config.tables import OffloadConfig
from kvcached_client.doctor.memory_bounds import MemoryBound
from tests.config.test_config import GOOD, load, problems

OFFLOAD = "[host]\nsize_bytes = 67108864\n[offload]\n"


def test_config_of_offload_mode_needs_no_replica(tmp_path: Path) -> None:
    """A host pool and the table that lets engines use it are enough."""
    config = load(tmp_path, OFFLOAD)

    assert (config.replica, config.offload) == ((), OffloadConfig(namespaces_max=8))
    assert load(tmp_path, OFFLOAD + "namespaces_max = 3\n").offload == OffloadConfig(namespaces_max=3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[offload]\n", "offload: does nothing without [host]; add [host], or remove it"),
        (OFFLOAD + "namespaces_max = 0\n", "offload.namespaces_max = 0: is too small"),
        (OFFLOAD + "model = 1\n", "offload.model"),
        (OFFLOAD.replace("offload", "attached"), ":3: attached: there is no such key; did you mean offload?"),
        (
            OFFLOAD.replace("67108864", "67108863"),
            "makes 0 slabs of 67108864 bytes; namespaces, which take one each: 1",
        ),
        (GOOD + OFFLOAD, "makes 1 slabs of 67108864 bytes; namespaces, which take one each: 2; use 134217728 or more"),
    ],
    ids=["no host pool", "no namespace", "unknown key", "former name", "no slab", "no slab beside a replica"],
)
def test_config_of_offload_mode_that_serves_nobody_is_refused(text: str, expected: str, tmp_path: Path) -> None:
    """Offload mode needs a host pool with a slab for it; namespaces of replicas have theirs."""
    assert expected in "\n".join(problems(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("slots = = 3", "is no TOML"), (b"\xff", "cannot be read"), (None, "cannot be read: No such file")],
)
def test_config_error_for_unreadable_file(text: str | bytes | None, expected: str, tmp_path: Path) -> None:
    """A file that is missing, no text or no TOML is one problem with the file's path."""
    path = tmp_path / "kvcached.toml"
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)

    with pytest.raises(ConfigError) as caught:
        load_config(path, environment={})

    assert str(caught.value).startswith(f"{path}: file: {expected}")


def test_config_host_tier_is_absent_unless_asked_for(tmp_path: Path) -> None:
    """Without a table [host] there is none; with one, its size in bytes becomes whole slabs."""
    text = GOOD.replace("[[replica]]", "[host]\nsize_bytes = 100_000_000\nslab_bytes = 8_388_608\n[[replica]]")

    host = load(tmp_path, text).host

    assert load(tmp_path, GOOD).host is None
    assert host is not None
    assert (host.slabs, host.verify) == (11, "inherited")


def test_config_host_table_can_come_from_the_environment(tmp_path: Path) -> None:
    """Variables can add the table that a file lacks."""
    host = load(tmp_path, GOOD, {"KVCACHED_HOST__SIZE_BYTES": "134217728"}).host

    assert host is not None
    assert host.slabs == 2


@pytest.mark.parametrize(
    ("limits_bytes", "slabs"),
    [([4 << 30], 32), ([4 << 30, 1 << 30], 8), ([256 << 20], 2)],
    ids=["machine", "limited cgroup", "small"],
)
def test_config_host_size_can_be_a_part_of_the_memory(
    limits_bytes: list[int], slabs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A percentage is one of the machine's memory, or of the tightest limit of a cgroup, however much of it is used."""
    bounds = [MemoryBound(limit, 1, "a file") for limit in limits_bytes]
    monkeypatch.setattr(tables, "memory_bounds", lambda: bounds)

    host = load(tmp_path, GOOD.replace("[[replica]]", "[host]\nmemory_percent = 50\n[[replica]]")).host

    assert host is not None
    assert host.slabs == slabs


@pytest.mark.parametrize(
    ("limits_bytes", "expected"),
    [
        ([100 << 20], "host.memory_percent = 50: makes 0 slabs of 67108864 bytes; namespaces, which take one each: 1;"),
        ([], "host.memory_percent = 50: cannot be told from /proc/meminfo here; name size_bytes"),
    ],
    ids=["too little", "no limit"],
)
def test_config_host_of_no_size_is_refused(
    limits_bytes: list[int], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the memory that makes no slab, or is not known, is a mistake of that key."""
    bounds = [MemoryBound(limit, 1, "a file") for limit in limits_bytes]
    monkeypatch.setattr(tables, "memory_bounds", lambda: bounds)

    text = GOOD.replace("[[replica]]", "[host]\nmemory_percent = 50\n[[replica]]")

    assert expected in "\n".join(problems(tmp_path, text))


def test_config_counts_a_slab_for_each_namespace(tmp_path: Path) -> None:
    """Replicas of one model need one slab together, replicas of two models one each."""
    host = "[host]\nsize_bytes = 65536\nslab_bytes = 65536\n"
    replica = GOOD[GOOD.index("[[replica]]") :]
    same = replica.replace("default", "second")
    other = same.replace('model = "m"', 'model = "n"')

    assert load(tmp_path, host + replica + same).replica[1].namespace(0) == load(tmp_path, GOOD).replica[0].namespace(0)
    (problem,) = problems(tmp_path, host + replica + other)
    assert ":2: host.size_bytes = 65536: makes 1 slabs of 65536 bytes" in problem
    assert "use 131072 or more" in problem


@pytest.mark.parametrize(("percent", "slots"), [(0, 0), (2, 1), (50, 32)])
def test_config_watermark_is_a_part_of_the_slots(percent: int, slots: int, tmp_path: Path) -> None:
    """The watermark in slots is rounded down."""
    text = GOOD.replace("slots = 64", f"slots = 64\nfree_watermark_percent = {percent}")
    text += "\n[host]\nsize_bytes = 67108864\n"

    assert load(tmp_path, text).replica[0].watermark_slots == slots


@pytest.mark.parametrize("key", ["free_watermark_percent", "load_threshold_blocks", "load_quota_blocks"])
def test_config_keys_of_the_host_tier_need_one(key: str, tmp_path: Path) -> None:
    """A key that would do nothing without a host tier is refused there, with what to do."""
    (problem,) = problems(tmp_path, GOOD.replace("slots = 64", f"slots = 64\n{key} = 3"))

    assert f"{key} = 3: does nothing without [host]" in problem
    assert "add [host], or remove it" in problem
