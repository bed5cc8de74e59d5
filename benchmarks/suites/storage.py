"""Suite ``storage``: backends over raw reads and writes, and the disk's start with a million blocks."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from benchmarks.redis_rig import RedisRig, start_server
from benchmarks.result import Result, Target, judge
from benchmarks.storage_daemon import match_beside_writes, regret
from benchmarks.storage_rig import RawFile, forget_cached_pages, in_threads, value_memory, write_index
from benchmarks.timing import interleave
from kvcached.storage.backend import DONE, Block
from kvcached.storage.disk.backend import DiskStorage
from kvcached.storage.disk.directory import DiskSettings
from kvcached.storage.frame import FRAME_BYTES
from kvcached.storage.tiers.backend import TieredStorage

_PART_BYTES = 512 << 10
_SHARDS = 2
_VALUE_BYTES = FRAME_BYTES + _SHARDS * _PART_BYTES
_THREADS = 4
#: Of each thread in each round: one batch.
_BATCH = 16
_ROUND_BYTES = _THREADS * _BATCH * _VALUE_BYTES
_TIMEOUT_S = 60.0
_BLOCKS = 1_000_000
_STARTS = 3
#: Slots of a round, three times: a put always finds older blocks to evict, and a get those of the last put.
_ROUNDS_KEPT = 3


def run(rounds: int) -> Iterator[Result]:
    """Measure in a directory for temporary files (`TMPDIR`), which has to be on the device in question."""
    with tempfile.TemporaryDirectory(prefix="kvcached-bench-") as name:
        yield from _throughput(Path(name), rounds)
        yield from _service(Path(name), rounds)
        yield from _starts(Path(name))
        yield from match_beside_writes(Path(name), max(rounds // 6, 10))
        yield from regret(Path(name))


def _throughput(directory: Path, rounds: int) -> Iterator[Result]:
    with ExitStack() as parts:
        rig = _Rig(directory, parts)
        work = {
            "raw_put": rig.raw_put,
            "put": rig.put,
            "raw_get": rig.raw_get,
            "get": rig.get,
            "local_get": rig.local_get,
        }
        seconds = interleave(work, rounds)
    speed = {name: _ROUND_BYTES / min(measured) / 1e9 for name, measured in seconds.items()}
    for name in ("put", "get"):
        floor, target = speed[f"raw_{name}"], Target("ratio", ">=", 0.8)
        yield judge("storage", f"disk_{name}_gb_per_s", speed[name], "GB/s", floor=floor, target=target)
        ratios = [raw / ours for raw, ours in zip(seconds[f"raw_{name}"], seconds[name], strict=True)]
        yield judge("storage", f"disk_{name}_over_raw_median_ratio", statistics.median(ratios), "ratio")
    target = Target("ratio", ">=", 0.95)
    yield judge("storage", "local_disk_get_gb_per_s", speed["local_get"], "GB/s", floor=speed["get"], target=target)


def _service(directory: Path, rounds: int) -> Iterator[Result]:
    """The same values in a Valkey server on this machine, by the backend and by redis-py alone."""
    with ExitStack() as parts:
        rig = RedisRig(start_server(directory, parts), parts, _THREADS, _BATCH, _PART_BYTES, _SHARDS)
        work = {"plain_put": rig.plain_put, "put": rig.put, "plain_get": rig.plain_get, "get": rig.get}
        seconds = interleave(work, rounds)
        for name in ("put", "get"):
            speed, floor = (rig.round_bytes / min(seconds[each]) / 1e9 for each in (name, f"plain_{name}"))
            target = Target("ratio", ">=", 1.0)
            yield judge("storage", f"redis_{name}_gb_per_s", speed, "GB/s", floor=floor, target=target)


class _Rig:
    """A disk backend and a raw file on one device, with as many slots."""

    def __init__(self, directory: Path, parts: ExitStack) -> None:
        slots = _ROUNDS_KEPT * _THREADS * _BATCH
        # A file has a quarter of the capacity at most: four of them, and what is beside.
        settings = DiskSettings(
            directory=directory / "disk",
            capacity_bytes=slots * (_VALUE_BYTES + (64 << 10)),
            free_space_floor_bytes=0,
            threads=_THREADS,
        )
        self._disk = DiskStorage(settings)
        parts.callback(self._disk.close)
        self._tiers = TieredStorage(self._disk, self._disk, "never asked")
        self._raw = RawFile(directory / "raw", _VALUE_BYTES, slots)
        parts.callback(self._raw.close)
        self._pool = parts.enter_context(ThreadPoolExecutor(_THREADS))
        self._memory = [[value_memory(_PART_BYTES, _SHARDS) for _ in range(_BATCH)] for _ in range(_THREADS)]
        self._slots = slots
        self._round = 0

    def raw_put(self) -> None:
        """Write a round's values to the slots that are next."""
        self._round += 1

        def work(thread: int) -> None:
            for at, memory in enumerate(self._memory[thread]):
                self._raw.write(self._slot(thread, at), memory)

        in_threads(self._pool, work, _THREADS)

    def raw_get(self) -> None:
        """Read what `raw_put` wrote last."""

        def work(thread: int) -> None:
            for at, memory in enumerate(self._memory[thread]):
                self._raw.read(self._slot(thread, at), memory)

        in_threads(self._pool, work, _THREADS)

    def _slot(self, thread: int, at: int) -> int:
        return (self._round * _THREADS * _BATCH + thread * _BATCH + at) % self._slots

    def put(self) -> None:
        """Put a round's values under new keys."""

        def work(thread: int) -> None:
            assert self._disk.put(self._blocks(thread), timeout_s=_TIMEOUT_S) == [DONE] * _BATCH

        in_threads(self._pool, work, _THREADS)

    def get(self) -> None:
        """Get what `put` put last."""

        def work(thread: int) -> None:
            assert self._disk.get(self._blocks(thread), timeout_s=_TIMEOUT_S) == [DONE] * _BATCH

        in_threads(self._pool, work, _THREADS)

    def local_get(self) -> None:
        """The same through a local disk in front of a service, which is not asked: the disk has all of it."""

        def work(thread: int) -> None:
            assert self._tiers.get(self._blocks(thread), timeout_s=_TIMEOUT_S) == [DONE] * _BATCH

        in_threads(self._pool, work, _THREADS)

    def _blocks(self, thread: int) -> list[Block]:
        first = (self._round * _THREADS + thread) * _BATCH
        keys = [(first + at).to_bytes(32, "little") for at in range(_BATCH)]
        return [Block(key, memory) for key, memory in zip(keys, self._memory[thread], strict=True)]


def _starts(directory: Path) -> Iterator[Result]:
    """A process of its own opens a million blocks, its files not in the page cache."""
    kept = directory / "million"
    write_index(kept, _BLOCKS)
    index_bytes = (kept / "index.db").stat().st_size
    opened = [_opened(kept) for _ in range(_STARTS)]
    yield judge("storage", "open_1m_s", min(each["seconds"] for each in opened), "s")
    yield judge("storage", "open_1m_grown_mib", max(each["grown_mib"] for each in opened), "MiB")
    yield judge("storage", "index_bytes_per_block", index_bytes / _BLOCKS, "bytes")


def _opened(kept: Path) -> dict[str, float]:
    forget_cached_pages(kept)
    command = [sys.executable, "-m", "benchmarks.storage_rig", str(kept)]
    told = subprocess.run(command, check=True, capture_output=True, text=True)
    measured: dict[str, float] = json.loads(told.stdout)
    assert measured["blocks"] == _BLOCKS
    return measured
