"""Kills and stops: each method is a kind of fault, and returns what it was done to."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Final

from tests.chaos.world import SESSION_TTL_MS, Daemon, EngineGroup

if TYPE_CHECKING:
    from tests.chaos.faults import Schedule

#: Pauses of stopped processes: shorter than a session's time to live, about as long, longer.
STOPS_S: Final = (0.05, 0.3, SESSION_TTL_MS / 1000, 2.5 * SESSION_TTL_MS / 1000)
#: Of a worker, and of storage: longer than what the daemon waits for them.
_LONG_STOP_S: Final = 5.0


class Deeds:
    """Faults of processes.

    Attributes:
        starts_killed: daemons in a row that were killed before they were ready.
    """

    def __init__(
        self,
        random: Random,
        daemon: Daemon,
        engines: list[EngineGroup],
        schedule: Schedule,
        counts: Counter[str],
        note: Callable[[str], None],
    ) -> None:
        self._random = random
        self._daemon = daemon
        self._engines = engines
        self._schedule = schedule
        self._counts = counts
        self._note = note
        self.starts_killed = 0

    # --- engines ----------------------------------------------------------------------------------------------------

    def kill_scheduler(self) -> str:
        return self._kill_roles(self._an_engine(), ["scheduler"])

    def kill_shard(self) -> str:
        engine = self._an_engine()
        return self._kill_roles(engine, [self._a_shard(engine)])

    def kill_engine(self) -> str:
        engine = self._an_engine()
        return self._kill_roles(engine, list(engine.pids))

    def stop_scheduler(self) -> str:
        return self._stop_role(self._an_engine(), "scheduler", self._random.choice(STOPS_S))

    def stop_shard(self) -> str:
        engine = self._an_engine()
        return self._stop_role(engine, self._a_shard(engine), self._random.choice(STOPS_S))

    # --- workers, storage, daemon -----------------------------------------------------------------------------------

    def kill_worker(self) -> str:
        return self._kill(self._a_worker())

    def stop_worker(self) -> str:
        return self._stop(self._a_worker(), self._random.choice([*STOPS_S, _LONG_STOP_S]))

    def kill_storage(self) -> str:
        return self._kill(self._daemon.storage_pid)

    def stop_storage(self) -> str:
        return self._stop(self._daemon.storage_pid, self._random.choice([*STOPS_S, _LONG_STOP_S]))

    def kill_daemon(self) -> str:
        if not self._daemon.is_ready():
            self.starts_killed += 1
        return self._kill(self._daemon.pid)

    def stop_daemon(self) -> str:
        return self._stop(self._daemon.pid, self._random.choice(STOPS_S))

    # --- together ---------------------------------------------------------------------------------------------------

    def kill_daemon_and_worker(self) -> str:
        return self._in_any_order(self.kill_daemon, self.kill_worker)

    def kill_daemon_and_all_workers(self) -> str:
        workers = [pid for _, pid in self._daemon.workers()]
        return self._in_any_order(self.kill_daemon, lambda: " ".join(self._kill(pid) for pid in workers))

    def kill_daemon_and_scheduler(self) -> str:
        return self._in_any_order(self.kill_daemon, self.kill_scheduler)

    def kill_daemon_and_engine(self) -> str:
        return self._in_any_order(self.kill_daemon, self.kill_engine)

    def kill_worker_and_engine(self) -> str:
        return self._in_any_order(self.kill_worker, self.kill_engine)

    def kill_daemon_then_engine(self) -> str:
        """The engine dies when it has rejoined, perhaps with work queued."""
        engine = self._an_engine()
        victims = self._random.choice([["scheduler"], [self._a_shard(engine)], list(engine.pids)])
        self._schedule.when_ready(self._random.uniform(0, 0.8), lambda: self._note(self._kill_roles(engine, victims)))
        return self.kill_daemon()

    def kill_daemon_while_a_shard_is_stopped(self) -> str:
        """The engine rejoins with work queued on that shard, and then dies, or the shard goes on."""
        engine = self._an_engine()
        shard, number, is_killed = self._a_shard(engine), engine.number, self._random.random() < 0.7

        def end_stop() -> None:
            if engine.number != number:
                return
            self._note(f"{shard} of {engine.name} {'is killed with it' if is_killed else 'goes on'}")
            if is_killed:
                self._kill_roles(engine, list(engine.pids))
            else:
                engine.send(shard, signal.SIGCONT)

        engine.send(shard, signal.SIGSTOP)
        self._schedule.after(self._random.uniform(0.05, 0.4), lambda: self._note(self.kill_daemon()))
        self._schedule.when_ready(self._random.uniform(0.2, 1.0), end_stop)
        return f"{engine.name} {shard}"

    # --- parts ------------------------------------------------------------------------------------------------------

    def _in_any_order(self, *actions: Callable[[], str]) -> str:
        order = list(actions)
        self._random.shuffle(order)
        return ", ".join(action() for action in order)

    def _an_engine(self) -> EngineGroup:
        return self._random.choice(self._engines)

    def _a_shard(self, engine: EngineGroup) -> str:
        """One of its shard processes; the only process of an engine that has none."""
        shards = [role for role in engine.pids if role != "scheduler"]
        return self._random.choice(shards) if shards else "scheduler"

    def _a_worker(self) -> int | None:
        workers = self._daemon.workers()
        return self._random.choice(workers)[1] if workers else None

    def _kill_roles(self, engine: EngineGroup, roles: list[str]) -> str:
        for role in roles:
            engine.send(role, signal.SIGKILL)
        return f"killed {engine.name}#{engine.number} {', '.join(roles)}"

    def _stop_role(self, engine: EngineGroup, role: str, stop_s: float) -> str:
        number = engine.number

        def go_on() -> None:
            if engine.number == number:
                engine.send(role, signal.SIGCONT)

        if engine.send(role, signal.SIGSTOP):
            self._schedule.after(stop_s, go_on)
        return f"stopped {engine.name}#{number} {role} for {stop_s:.2f} s"

    def _kill(self, pid: int | None) -> str:
        return f"killed {pid}" if self._send(pid, signal.SIGKILL) else "nobody there"

    def _stop(self, pid: int | None, stop_s: float) -> str:
        def go_on() -> None:
            self._send(pid, signal.SIGCONT)

        if not self._send(pid, signal.SIGSTOP):
            return "nobody there"
        self._schedule.after(stop_s, go_on)
        return f"stopped {pid} for {stop_s:.2f} s"

    def _send(self, pid: int | None, number: signal.Signals) -> bool:
        """Whether there was somebody."""
        try:
            if pid is not None:
                os.kill(pid, number)
                return True
        except ProcessLookupError:
            pass
        self._counts["nobody there"] += 1
        return False
