"""A backend in front of another one that fails as devices and services do.

Daemons that tests start find it by the name "faulty" (`faulty_backend` is on their path).

Faults come by chance, from a seed, or by plan. With one thread the same seed gives the same faults.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import msgspec

from kvcached.storage.backend import ABSENT, DONE, Block, Outcome, Result, Storage, Usage, no_progress
from kvcached.storage.disk.backend import open_disk

#: Keys that another block's value is taken from, by size.
_REMEMBERED: Final = 64


class Fault(StrEnum):
    """What goes wrong: the first three with a call, the others with a block of it."""

    DELAY = "delay"  #: any call takes long
    RAISE = "raise"  #: any call raises OSError
    HANG = "hang"  #: any call stays until `FaultStorage.release`
    FAIL = "fail"  #: get, put: FAILED
    LOSE = "lose"  #: get: ABSENT though it is there; put: DONE though it is not kept
    TEAR = "tear"  #: get: the rest of the value, from some byte on, is zeros
    FLIP = "flip"  #: get: one bit is another
    SWAP = "swap"  #: get: the value of another key, of the same size, where one was stored or read lately
    LIE = "lie"  #: exists: the contrary


CALL_FAULTS: Final = frozenset({Fault.DELAY, Fault.RAISE, Fault.HANG})


@dataclass(frozen=True, slots=True)
class FaultSettings:
    """How often.

    Attributes:
        rates: probability of each fault, per call or per block; together at most 1 for either.
        seed: of the draws.
        delay_s: what a delay takes at least.
        delay_p99_s: what 99 of 100 delays do not exceed, and none does; delays are then exponential. 0: all the same.
    """

    rates: Mapping[Fault, float] = field(default_factory=dict)
    seed: int = 0
    delay_s: float = 0.0
    delay_p99_s: float = 0.0

    def __post_init__(self) -> None:
        for kind in (CALL_FAULTS, set(Fault) - CALL_FAULTS):
            rates = [self.rates.get(fault, 0.0) for fault in kind]
            if min(rates) < 0 or sum(rates) > 1:
                raise ValueError(f"rates {dict(self.rates)} are no probabilities of {', '.join(sorted(kind))}")


class FaultStorage(Storage):
    """As the inner backend, apart from faults.

    Attributes:
        injected: how many of each there were.
    """

    def __init__(self, inner: Storage, settings: FaultSettings | None = None) -> None:
        self.capabilities = inner.capabilities
        self.injected: Counter[Fault] = Counter()
        self._inner = inner
        self._settings = settings or FaultSettings()
        self._random = random.Random(self._settings.seed)
        self._lock = threading.Lock()
        self._plan: deque[Fault | None] = deque()
        self._released = threading.Event()
        self._keys: dict[int, deque[bytes]] = {}

    def plan(self, *faults: Fault | None) -> None:
        """What happens next, before chance has a say again.

        A fault of a call happens to the next call, any other one to the next block; None spares one block.
        """
        with self._lock:
            self._plan.extend(faults)

    def release(self) -> None:
        """All delays and hangs end, also those to come."""
        self._released.set()

    def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        """Lies where that is drawn."""
        self._disturb_call()
        found = self._inner.exists(keys, timeout_s=timeout_s)
        return [is_there != (self._draw({Fault.LIE}) is not None) for is_there in found]

    def get(self, blocks: Sequence[Block], *, timeout_s: float) -> list[Result]:
        """Spoils what was read."""
        self._disturb_call()
        results = self._inner.get(blocks, timeout_s=timeout_s)
        return [
            self._spoil(block, result, timeout_s) if result.outcome is Outcome.DONE else result
            for block, result in zip(blocks, results, strict=True)
        ]

    def put(self, blocks: Sequence[Block], *, timeout_s: float) -> list[Result]:
        """Keeps what no fault is drawn for."""
        self._disturb_call()
        faults = [self._draw({Fault.FAIL, Fault.LOSE}) for _ in blocks]
        kept = [block for block, fault in zip(blocks, faults, strict=True) if fault is None]
        results = iter(self._inner.put(kept, timeout_s=timeout_s))
        for block in kept:
            self._remember(block)
        return [next(results) if fault is None else DONE if fault is Fault.LOSE else _failed() for fault in faults]

    def delete(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        """As inside."""
        self._disturb_call()
        return self._inner.delete(keys, timeout_s=timeout_s)

    def clear(self, prefix: bytes, *, timeout_s: float, progress: Callable[[], None] = no_progress) -> int:
        """As inside."""
        self._disturb_call()
        return self._inner.clear(prefix, timeout_s=timeout_s, progress=progress)

    def usage(self) -> Usage:
        """As inside."""
        return self._inner.usage()

    def close(self) -> None:
        """Close the inner backend, too."""
        self.release()
        self._inner.close()

    def _disturb_call(self) -> None:
        match self._draw(CALL_FAULTS):
            case Fault.DELAY:
                self._released.wait(self._delay_s())
            case Fault.RAISE:
                raise OSError("injected fault")
            case Fault.HANG:
                self._released.wait()

    def _delay_s(self) -> float:
        least, p99 = self._settings.delay_s, self._settings.delay_p99_s
        if p99 <= least:
            return least
        with self._lock:
            return min(p99, least + self._random.expovariate(4.605 / (p99 - least)))  # e ** -4.605 is 0.01

    def _draw(self, possible: set[Fault] | frozenset[Fault]) -> Fault | None:
        """The fault of this call, or of this block; None for none."""
        with self._lock:
            drawn = self._planned(possible) if self._plan else self._by_chance(possible)
            if drawn is not None:
                self.injected[drawn] += 1
            return drawn

    def _planned(self, possible: set[Fault] | frozenset[Fault]) -> Fault | None:
        head = self._plan[0]
        is_next = possible != CALL_FAULTS if head is None else head in possible
        return self._plan.popleft() if is_next else None

    def _by_chance(self, possible: set[Fault] | frozenset[Fault]) -> Fault | None:
        point = self._random.random()
        for fault in Fault:
            if fault in possible:
                point -= self._settings.rates.get(fault, 0.0)
                if point < 0:
                    return fault
        return None

    def _spoil(self, block: Block, result: Result, timeout_s: float) -> Result:
        """What becomes of a block that was read."""
        spoils: dict[Fault, Callable[[], Result]] = {
            Fault.FAIL: _failed,
            Fault.LOSE: lambda: ABSENT,
            Fault.TEAR: lambda: self._tear(block),
            Fault.FLIP: lambda: self._flip(block),
            Fault.SWAP: lambda: self._swap(block, timeout_s),
        }
        fault = self._draw(set(spoils))
        self._remember(block)
        return result if fault is None else spoils[fault]()

    def _place(self, block: Block) -> tuple[int, int]:
        """A random byte of the value: its part, and where in it."""
        with self._lock:
            at = self._random.randrange(block.size_bytes)
        number = 0
        while at >= block.parts[number].nbytes:
            at -= block.parts[number].nbytes
            number += 1
        return number, at

    def _tear(self, block: Block) -> Result:
        number, at = self._place(block)
        for part in (block.parts[number][at:], *block.parts[number + 1 :]):
            part[:] = bytes(part.nbytes)
        return DONE

    def _flip(self, block: Block) -> Result:
        number, at = self._place(block)
        with self._lock:
            block.parts[number][at] ^= 1 << self._random.randrange(8)
        return DONE

    def _swap(self, block: Block, timeout_s: float) -> Result:
        with self._lock:
            others = [key for key in self._keys.get(block.size_bytes, ()) if key != block.key]
        if others:
            self._inner.get([Block(others[-1], block.parts)], timeout_s=timeout_s)
        return DONE

    def _remember(self, block: Block) -> None:
        with self._lock:
            self._keys.setdefault(block.size_bytes, deque(maxlen=_REMEMBERED)).append(block.key)


def open_faulty(settings: dict[str, Any]) -> FaultStorage:
    """The backend "faulty" of daemons that tests start: a disk with the faults of its setting `faults`."""
    rest = {name: value for name, value in settings.items() if name != "faults"}
    return FaultStorage(open_disk(rest), msgspec.convert(settings["faults"], FaultSettings))


def _failed() -> Result:
    return Result(Outcome.FAILED, "injected fault")
