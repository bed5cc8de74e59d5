"""One run: a daemon, engines, faults by the seed, and what must be true during it and after it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from kvcached_client.errors import KvcachedError
from tests.chaos.faults import NOT_PLAYED, SCENES, Faults
from tests.chaos.nursery import Nursery
from tests.chaos.world import ENGINES, Daemon, EngineGroup, config_text, descendants, description
from tests.daemon.supervised import Supervised, supervised
from tests.faults.harness import held

#: How long engines have to serve again, and what they held has to be free, once nothing is done to them any more.
PATIENCE_S = 30
#: A run of 240 seconds that compares fewer blocks, or plays fewer faults, proves nothing. Shorter ones need their part.
COMPARED_MIN_PER_S = 60
FAULTS_MIN_PER_S = 0.4
#: So many times its seconds a run takes at most to have them.
_LONGER_MAX = 4
_TICK_S = 0.01
#: Longer than the daemon takes for it on a busy machine.
_STOP_S = 30
#: Daemons are killed so often that the supervisor's own pauses would fill the run.
_PAUSE_MAX_S = 0.4
_EVENTS_TOLD = 100
_SUSPECT_WORDS = ("Traceback", "internal error", "IllegalTransition", "critical")


class SupervisorEnded(Exception):
    """There is no daemon to go on with."""


@dataclass
class Outcome:
    """What a run has seen.

    Attributes:
        failures: what must not be.
    """

    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def compared(self) -> int:
        """Blocks of hits that were compared, each on each shard."""
        return sum(count for name, count in self.counts.items() if name.startswith("compared "))

    @property
    def fault_count(self) -> int:
        """Faults that were played."""
        return sum(self.faults[kind] for kind in self.faults.keys() - NOT_PLAYED)


def least(seconds: float, scenes: list[str]) -> tuple[float, float]:
    """How many blocks a run has to compare, and how many faults to play; with some scenes only, fewer."""
    share = len(scenes) / len(SCENES)
    return COMPARED_MIN_PER_S * seconds * share, FAULTS_MIN_PER_S * seconds * share


class Run:
    """A run of one seed.

    Args:
        directory: an empty one, for all files; not longer than a socket's path allows.
    """

    def __init__(self, seed: int, seconds: float, scenes: list[str], directory: Path) -> None:
        self._seconds = seconds
        self._least = least(seconds, scenes)
        self._scenes = scenes
        self._directory = directory
        self._seed = seed
        self.outcome = Outcome(seed)
        self._notes: deque[str] = deque(maxlen=4000)
        self._served: Counter[str] = Counter()
        self._rest = b""

    def play(self) -> Outcome:
        """All of it."""
        self._reports, reports = os.pipe()
        os.set_blocking(self._reports, False)
        self._nursery = Nursery(reports, self._directory)
        os.close(reports)
        try:
            config = config_text(self._directory, Random(f"{self._seed}/config"))
            with supervised(self._directory, config, pause_max_s=_PAUSE_MAX_S, failed_starts_max=100) as running:
                self._play_with(running)
        finally:
            self._nursery.close()
            os.close(self._reports)
        self._look_at_log()
        (self._directory / "faults.story").write_text("\n".join(self._notes))
        return self.outcome

    def _play_with(self, running: Supervised) -> None:
        daemon = Daemon(running)
        self._engines = [EngineGroup(name, self._seed, daemon.run_dir) for name in ENGINES]
        faults = Faults(self._seed, self._scenes, daemon, self._engines, self._note, self._fail)
        self.outcome.faults = faults.counts
        try:
            start_s = time.monotonic()
            while not self._is_over(time.monotonic() - start_s):
                self._tend(running)
                faults.play()
            faults.end()
            self._await_service(running, faults)
        except SupervisorEnded:
            return
        finally:
            for engine in self._engines:
                engine.end()
        self._hear()
        self._await_nothing_held(daemon)
        self._stop(running)

    def _stop(self, running: Supervised) -> None:
        """The supervisor ends with its daemon when it is told to."""
        running.process.terminate()
        try:
            status = running.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            pids = [running.process.pid, *descendants(running.process.pid)]
            self._fail(f"not stopped after {_STOP_S} s: " + "; ".join(map(description, pids)))
        else:
            if status:
                self._fail(f"the supervisor ended with status {status}")

    def _is_over(self, passed_s: float) -> bool:
        """When its time is over and enough was seen. A busy machine takes longer for that, but not for ever."""
        is_enough = self.outcome.compared >= self._least[0] and self.outcome.fault_count >= self._least[1]
        return passed_s >= self._seconds * (1 if is_enough else _LONGER_MAX)

    def _tend(self, running: Supervised) -> None:
        """Hear the engines, and start those that are dead again."""
        time.sleep(_TICK_S)
        running.forget_notices()
        self._hear()
        for engine in self._engines:
            if not engine.living():
                engine.spawn(self._nursery)
                self._note(f"{engine.name}#{engine.number} is {engine.pids}")
        if running.process.poll() is not None:
            self._fail(f"the supervisor ended with status {running.process.returncode}")
            raise SupervisorEnded

    def _hear(self) -> None:
        while True:
            try:
                data = os.read(self._reports, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            message: dict[str, Any] = json.loads(line)
        except ValueError:
            self._fail(f"an engine said {line!r}")
            return
        if message["kind"] == "counts":
            counts = Counter(message["counts"])
            self.outcome.counts.update(counts)
            self._served[message["engine"].partition("#")[0]] += counts["requests"]
            return
        self._fail(self._story(message))

    def _story(self, message: dict[str, Any]) -> str:
        """Everything that is known of a finding."""
        name = message["engine"].partition("#")[0]
        path = self._directory / f"{name}.story"
        events = path.read_text().splitlines()[-_EVENTS_TOLD:] if path.exists() else []
        log = (self._directory / "run.log").read_text().splitlines()[-_EVENTS_TOLD // 2 :]
        return "\n  ".join([json.dumps(message), "faults:", *list(self._notes)[-30:], "events:", *events, "log:", *log])

    def _await_service(self, running: Supervised, faults: Faults) -> None:
        """Every engine serves requests again."""
        before, end_s = Counter(self._served), time.monotonic() + PATIENCE_S
        waiting = set(ENGINES)
        while waiting and time.monotonic() < end_s:
            self._tend(running)
            faults.play_due()
            waiting = {name for name in waiting if self._served[name] < before[name] + 10}
        for name in waiting:
            self._fail(self._story({"kind": "hang", "engine": name, "error": f"served nothing for {PATIENCE_S} s"}))

    def _await_nothing_held(self, daemon: Daemon) -> None:
        """What dead engines held is free, and no invariant is broken."""
        left: object = "no answer"
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            try:
                with daemon.admin() as admin:
                    if violations := admin.check().violations:
                        self._fail(f"invariants: {violations}")
                    if not (left := held(admin.stats())):
                        return
            except KvcachedError as error:
                left = str(error)
            time.sleep(0.1)
        self._fail(f"held {PATIENCE_S} s after all engines were dead: {left}")

    def _look_at_log(self) -> None:
        lines = (self._directory / "run.log").read_text(errors="replace").splitlines()
        for number, line in enumerate(lines):
            if any(word in line for word in _SUSPECT_WORDS):
                self._fail("daemon's log: " + "\n  ".join(lines[max(number - 3, 0) : number + 25]))
                return

    def _note(self, what: str) -> None:
        self._notes.append(f"{time.monotonic():.4f} {what}")

    def _fail(self, what: str) -> None:
        self._note(f"FAILURE {what[:200]}")
        self.outcome.failures.append(what)
