"""What a storage device of the simulated machine holds, which no process's death takes along, and how it fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcached.storage.backend import ABSENT, DONE, Block, Capabilities, Outcome, Result, Storage, Usage, no_progress
from tests.simulation.scheduler import Chance


@dataclass
class DeviceWeather:
    """How a device does.

    Attributes:
        raises: how likely a call fails as a whole.
        fails: the same of one block of it.
        is_full: nothing more is stored.
        mixes: how likely it hands out another value of the same size.
        slowness: how many times longer than usual everything takes.
        hangs: how likely it is that an order takes seconds.
    """

    raises: float = 0.0
    fails: float = 0.0
    is_full: bool = False
    mixes: float = 0.0
    slowness: int = 1
    hangs: float = 0.0

    @staticmethod
    def drawn(chance: Chance) -> DeviceWeather:
        """Some kinds of trouble."""
        return DeviceWeather(
            raises=chance.among([0.0, 0.0, 0.1, 1.0]),
            fails=chance.among([0.0, 0.0, 0.1]),
            is_full=chance.happens(0.1),
            mixes=chance.among([0.0, 0.0, 0.2]),
            slowness=chance.among([1, 1, 5, 60]),
            hangs=chance.among([0.0, 0.0, 0.1]),
        )


class StoredValues(Storage):
    """Values in memory, written and read at once: the time that this takes passes in `SimulatedStorage`."""

    capabilities = Capabilities(threads=4, batch_blocks=3)

    def __init__(self, chance: Chance, seen: Counter[str]) -> None:
        self.weather = DeviceWeather()
        self._chance = chance
        self._seen = seen
        self._values: dict[bytes, bytes] = {}

    def rot(self) -> bool:
        """A bit of some value changes, or a value is lost; False where there is none."""
        if not self._values:
            return False
        key = self._chance.among(list(self._values))
        value = bytearray(self._values.pop(key))
        if self._chance.happens(0.7):
            value[self._chance.number(0, len(value) - 1)] ^= 1
            self._values[key] = bytes(value)
        return True

    def empty(self) -> None:
        """Somebody has removed everything."""
        self._values.clear()

    def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        self._may_raise()
        return [key in self._values for key in keys]

    def get(self, blocks: Sequence[Block], *, timeout_s: float) -> list[Result]:
        self._may_raise()
        return [self._get(block) for block in blocks]

    def put(self, blocks: Sequence[Block], *, timeout_s: float) -> list[Result]:
        self._may_raise()
        return [self._put(block) for block in blocks]

    def delete(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        self._may_raise()
        return sum(self._values.pop(key, None) is not None for key in keys)

    def clear(self, prefix: bytes, *, timeout_s: float, progress: Callable[[], None] = no_progress) -> int:
        self._may_raise()
        gone = [key for key in self._values if key.startswith(prefix)]
        for key in gone:
            del self._values[key]
        return len(gone)

    def usage(self) -> Usage:
        return Usage(len(self._values), sum(map(len, self._values.values())), 1 << 30)

    def _may_raise(self) -> None:
        if self.weather.raises and self._chance.happens(self.weather.raises):
            self._seen["storage call that failed"] += 1
            raise OSError("the device failed")

    def _get(self, block: Block) -> Result:
        if self.weather.fails and self._chance.happens(self.weather.fails):
            _fill(block, b"half of something".ljust(block.size_bytes, b"?"))
            return Result(Outcome.FAILED, "it cannot be read")
        value = self._values.get(block.key)
        if value is not None and self.weather.mixes and self._chance.happens(self.weather.mixes):
            value = self._chance.among([each for each in self._values.values() if len(each) == len(value)])
            self._seen["another value handed out by storage"] += value != self._values[block.key]
        if value is None or len(value) != block.size_bytes:
            return ABSENT
        _fill(block, value)
        return DONE

    def _put(self, block: Block) -> Result:
        if self.weather.is_full:
            return Result(Outcome.FULL, "no room")
        if self.weather.fails and self._chance.happens(self.weather.fails):
            return Result(Outcome.FAILED, "it cannot be written")
        self._values[block.key] = b"".join(bytes(part) for part in block.parts)
        return DONE


def _fill(block: Block, value: bytes) -> None:
    for part in block.parts:
        part[:] = value[: part.nbytes]
        value = value[part.nbytes :]
