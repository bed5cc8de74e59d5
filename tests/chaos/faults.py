"""When what is done to the processes of a run, chosen by its seed."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Final

from tests.chaos.deeds import Deeds
from tests.chaos.orders import Orders
from tests.chaos.world import Daemon, EngineGroup

#: Seconds between two faults, at most.
PAUSE_S: Final = 2.0
#: Daemons in a row that are killed before they are ready.
_STARTS_KILLED_MAX: Final = 3
_START_KILLED_SHARE: Final = 0.1
#: So many faults are left out while no daemon is ready, so that engines live to rejoin the next one.
_SPARED_SHARE: Final = 0.7
#: How long a daemon has been ready before something is done to it.
_READY_S: Final = (0.3, 6.0)
_LOOK_PAUSE_S: Final = 0.05
#: Methods of `Deeds` and `Orders` by scene, with their weights.
SCENES: Final[dict[str, dict[str, int]]] = {
    "engines": {"kill_scheduler": 5, "kill_shard": 3, "kill_engine": 3, "stop_scheduler": 3, "stop_shard": 4},
    "workers": {"kill_worker": 6, "stop_worker": 4},
    "storage": {"kill_storage": 2, "stop_storage": 1},
    "daemon": {"kill_daemon": 9, "stop_daemon": 3},
    "together": {
        "kill_daemon_and_worker": 4,
        "kill_daemon_and_all_workers": 3,
        "kill_daemon_and_scheduler": 4,
        "kill_daemon_and_engine": 2,
        "kill_worker_and_engine": 2,
    },
    "rejoins": {"kill_daemon_then_engine": 7, "kill_daemon_while_a_shard_is_stopped": 8},
    "orders": {
        "clear": 3,
        "set_weights": 3,
        "set_policy": 2,
        "pin": 3,
        "pause": 2,
        "drain": 1,
        "storage_order": 1,
        "check": 2,
    },
}
#: What is counted beside the faults that were played.
NOT_PLAYED: Final = frozenset({"nobody there", "orders refused or unanswered"})


class Schedule:
    """What is to be done later.

    Args:
        daemon: for what waits for one that is ready.
    """

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._waiting: list[tuple[float, float, Callable[[], None]]] = []
        self._number = 0
        self._look_s = 0.0

    def after(self, pause_s: float, action: Callable[[], None]) -> None:
        """Do it after so long."""
        self._number += 1
        heapq.heappush(self._due, (time.monotonic() + pause_s, self._number, action))

    def when_ready(self, pause_s: float, action: Callable[[], None]) -> None:
        """Do it so long after the next daemon is ready; the present one is killed within half a second."""
        self._waiting.append((time.monotonic() + 0.6, pause_s, action))

    def play(self) -> None:
        """Do what is due."""
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
        now_s = time.monotonic()
        ripe = [each for each in self._waiting if each[0] <= now_s]
        if ripe and now_s >= self._look_s:
            self._look_s = now_s + _LOOK_PAUSE_S
            if self._daemon.is_ready():
                for each in ripe:
                    self._waiting.remove(each)
                    self.after(*each[1:])

    def play_all(self) -> None:
        """Do everything now."""
        for _, pause_s, action in self._waiting:
            self.after(pause_s, action)
        self._waiting.clear()
        while self._due:
            heapq.heappop(self._due)[2]()


class Faults:
    """Faults of one run.

    Args:
        scenes: of `SCENES`.
        note: told of every fault.
        violated: told of invariants that are broken.

    Attributes:
        counts: faults that were played, by kind, and what is `NOT_PLAYED`.
    """

    def __init__(
        self,
        seed: int,
        scenes: list[str],
        daemon: Daemon,
        engines: list[EngineGroup],
        note: Callable[[str], None],
        violated: Callable[[str], None],
    ) -> None:
        self._random = Random(f"{seed}/faults")
        self._weights = {kind: weight for scene in scenes for kind, weight in SCENES[scene].items()}
        self._daemon = daemon
        self._note = note
        self.counts: Counter[str] = Counter()
        self._schedule = Schedule(daemon)
        self._deeds = Deeds(self._random, daemon, engines, self._schedule, self.counts, note)
        self._orders = Orders(self._random, daemon, self._schedule, self.counts, note, violated)
        self._next_s = time.monotonic() + 1.0
        self._ready_s: float | None = None

    def play(self) -> None:
        """What is due now: later parts of earlier faults, and the next fault."""
        self._schedule.play()
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + self._random.uniform(0.2, PAUSE_S)
        may_touch = self._may_touch_daemon()
        if self._ready_s is None and self._random.random() < _SPARED_SHARE:
            return
        kinds = [kind for kind in self._weights if may_touch or "daemon" not in kind]
        if kinds:
            kind = self._random.choices(kinds, [self._weights[each] for each in kinds])[0]
            actor = self._deeds if hasattr(self._deeds, kind) else self._orders
            self._note(f"{kind}: {getattr(actor, kind)()}")
            self.counts[kind] += 1

    def play_due(self) -> None:
        """Later parts of earlier faults."""
        self._schedule.play()

    def end(self) -> None:
        """What is stopped, paused or drained goes on, now."""
        self._schedule.play_all()
        self._orders.resume()

    def _may_touch_daemon(self) -> bool:
        """Once it has been ready for some time, so that others find it; seldom while it starts, and not every time.

        A supervisor gives up where no daemon gets ready, as it should.
        """
        now_s = time.monotonic()
        if not self._daemon.is_ready():
            self._ready_s = None
            return self._deeds.starts_killed < _STARTS_KILLED_MAX and self._random.random() < _START_KILLED_SHARE
        if self._ready_s is None:
            self._ready_s = now_s + self._random.uniform(*_READY_S)
            self._deeds.starts_killed = 0
        return now_s >= self._ready_s
