"""A backend in memory that fails, is full, or takes time when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcached.storage.backend import (
    ABSENT,
    DONE,
    Block,
    Capabilities,
    Outcome,
    Result,
    Storage,
    Usage,
    VersionedRecord,
    no_progress,
)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class FakeStorage(Storage):
    """Attributes: `calls`, by name; what happens in one: `error` is raised, other troubles are outcomes."""

    def __init__(self, *, is_shared: bool = False) -> None:
        self.capabilities = Capabilities(threads=7, batch_blocks=16, is_shared=is_shared)
        self.values: dict[bytes, bytes] = {}
        self.calls: list[str] = []
        self.limits_s: list[float] = []
        self.error: Exception | None = None
        self.failing = self.failing_puts = self.full = False
        self.on_call: Callable[[], None] = lambda: None
        self.is_closed = False

    def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        self._begin("exists", timeout_s)
        return [key in self.values for key in keys]

    def get(self, blocks: Sequence[Block], *, timeout_s: float) -> list[Result]:
        self._begin("get", timeout_s)
        return [self._get(block) for block in blocks]

    def put(self, blocks: Sequence[Block], *, timeout_s: float) -> list[Result]:
        self._begin("put", timeout_s)
        if (is_failing := self.failing or self.failing_puts) or self.full:
            return [Result(Outcome.FAILED if is_failing else Outcome.FULL, "put went wrong")] * len(blocks)
        for block in blocks:
            self.values[block.key] = b"".join(map(bytes, block.parts))
        return [DONE] * len(blocks)

    def delete(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        self._begin("delete", timeout_s)
        return sum(self.values.pop(key, None) is not None for key in keys)

    def clear(self, prefix: bytes, *, timeout_s: float, progress: Callable[[], None] = no_progress) -> int:
        self._begin("clear", timeout_s)
        gone = [key for key in self.values if key.startswith(prefix)]
        for key in gone:
            del self.values[key]
            progress()
        return len(gone)

    def read_record(self, *, timeout_s: float) -> VersionedRecord | None:
        return None

    def usage(self) -> Usage:
        return Usage(len(self.values), -1, -1)

    def close(self) -> None:
        self.is_closed = True

    def _begin(self, name: str, timeout_s: float) -> None:
        self.calls.append(name)
        self.limits_s.append(timeout_s)
        self.on_call()
        if self.error is not None:
            raise self.error

    def _get(self, block: Block) -> Result:
        if self.failing:
            return Result(Outcome.FAILED, "get went wrong")
        value = self.values.get(block.key)
        if value is None:
            return ABSENT
        for part in block.parts:
            part[:], value = value[: part.nbytes], value[part.nbytes :]
        return DONE
