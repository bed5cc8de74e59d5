"""Plays a seed: work, one fault in the middle of it, and what must be true afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Final

from tests.cuda.matrix.arming import Armed, arm
from tests.cuda.matrix.children import PATIENCE_S, Child
from tests.cuda.matrix.plans import Plan
from tests.cuda.matrix.world import BOTH_MODES, SLOTS, World, driver_environment, folder_of_processes, until
from tests.cuda_driver.device import bring_back, device_directory, live_granules
from tests.faults.harness import wait_stopped
from tests.project.source_tree import ROOT

#: Prompts of a seed: cached before the fault, and computed around it.
CACHED, WORKED = 4, 2
NUMBERS: Final = 10
#: Older prompts that are read in every seed; in managed mode the host pool alone has them.
OLDER: Final = 2
#: Prompts of a new world, more than its device pool has room for. Those of seed 1 begin behind them.
FILLED: Final = 2 * SLOTS // 3 - 2
#: Of each kind of engine, blocks of a prompt.
BLOCKS: Final = {"managed": 3, "offload": 6}
_LOOK: Final = re.compile(r"hit (\d+) ready (\d+) wrong (\d+)")
_POOL_GRANULES: Final = 1


def fill(world: World) -> list[int]:
    """Prompts that fill the device pool of a new world; the first of them are in the host pool alone afterwards."""
    numbers = list(range(FILLED))
    engine = world.engine("managed")
    for line in ("", *(f"compute {number}" for number in numbers), "settle 0", "leave 0"):
        said = engine.ask(line) if line else engine.hear()
        if said not in {"ready", "wrong 0", "left"}:
            raise Wrong(f"{line} in a new world: {said}")
    engine.kill()
    return numbers


def read_all(world: World, older: dict[str, list[int]]) -> None:
    """Read every prompt of a world, of both modes; what the daemon has of it is right."""
    for mode, numbers in older.items():
        engine = world.engine(mode)
        for line in ("", *(f"look {number}" for number in numbers), "leave 0"):
            said = engine.ask(line) if line else engine.hear()
            if said not in {"ready", "left"} and not said.endswith(" wrong 0"):
                raise Wrong(f"{line} of {mode} at the end: {said}")
        engine.kill()


class Wrong(Exception):
    """Something that must never be."""


class Seed:
    """One seed in a world.

    Args:
        older: prompts of seeds before, by mode; the seed's own are added.

    Attributes:
        failures: what should not be.
        counts: of what was seen.
    """

    def __init__(self, plan: Plan, world: World, older: dict[str, list[int]], counts: Counter[str]) -> None:
        self.failures: list[str] = []
        self.counts = counts
        self._plan = plan
        self._world = world
        self._older = older
        self._is_struck = False
        self._has_session = False
        self._dead: set[str] = set()
        first = FILLED + plan.seed * NUMBERS
        self._cached = list(range(first, first + CACHED))
        self._worked = list(range(first + CACHED, first + CACHED + WORKED))
        before = older[plan.mode]
        step = max(1, len(before) // OLDER)
        self._read_again = before[plan.seed % step :: step][:OLDER]

    def play(self) -> None:
        """All of it; what fails is in `failures`."""
        try:
            self._world.forget_events()
            self._world.forget_trace()
            self._cache()
            engine = self._work()
            self._recover(engine)
            engine.kill()
            if self._plan.loses_device:
                self._check_without_device()
                self._bring_back()
            self._check()
            self._check_nothing_is_left()
        except Exception as error:  # noqa: BLE001 - the seed has failed, whatever it is
            self.failures.append(f"{type(error).__name__}: {error}")
        finally:
            arm(self._world.folder, None)
            self._world.end_engines()
        self._older[self._plan.mode] += [*self._cached, *self._worked]

    # --- before -----------------------------------------------------------------------------------------------------

    def _cache(self) -> None:
        """Prompts are computed in peace."""
        engine = self._engine()
        for number in self._cached:
            self._ask(engine, f"compute {number}")
        self._ask(engine, "settle 0")
        self._look_whole(engine)
        self._leave(engine)

    def _engine(self, kind: str = "") -> Child:
        engine = self._world.engine(kind or self._plan.mode, seed=self._plan.seed)
        said = engine.hear()
        if said != "ready":
            raise Wrong(f"an engine is not ready: {said!r}")
        return engine

    # --- the fault --------------------------------------------------------------------------------------------------

    def _work(self) -> Child:
        """Compute and read while something happens to the victim; returns the engine, dead or alive."""
        plan, world = self._plan, self._world
        quiet = {"delay_us": plan.delay_us}
        faults = {"faults": plan.faults} if plan.faults else {}
        if plan.mode == "managed":
            world.prepare_worker(seed=plan.seed, **quiet, **(faults if plan.faulty == "worker" else {}))
            if plan.faulty == "worker" and plan.loses_device:
                world.kill("worker")  # the next one may lose the device before it is ready
            elif plan.faulty == "worker":
                world.renew_worker()
        action = "kill" if plan.ending == "kill" else "stop"
        place = plan.place
        arms = Armed(plan.seed, place.victim, place.failpoint, plan.at, action)
        if plan.is_early:
            arm(world.folder, arms)
        engine = world.engine(plan.mode, seed=plan.seed, **quiet, **(faults if plan.faulty == "engine" else {}))
        said = engine.hear(world.events, lambda: self._on_event(engine))
        self._has_session = self._judge("connect", said)
        if not plan.is_early:
            arm(world.folder, arms)
        for line in self._lines():
            if said and self._has_session:
                said = engine.ask(line, world.events, lambda: self._on_event(engine))
                self._judge(line, said)
        arm(world.folder, None)
        self._strike_late(engine)
        return engine

    def _lines(self) -> list[str]:
        older = [*self._read_again, *self._cached][:WORKED]
        return [
            *([f"crowd {self._plan.seed}"] if self._plan.crowds else []),
            *(f"{verb} {number}" for pair in zip(self._worked, older, strict=True)
              for verb, number in zip(("compute", "fetch"), pair, strict=True)),
            "settle 0",
        ]  # fmt: skip

    def _on_event(self, engine: Child) -> None:
        """The victim has reached its failpoint."""
        number, pid = self._world.take_event()
        if number != self._plan.seed:
            return
        self._is_struck = True
        self.counts["struck at the failpoint"] += 1
        if self._plan.ending == "kill":
            self._dead.add(self._plan.place.victim)
            if self._plan.also:
                self._kill(self._plan.also, engine)
        else:
            wait_stopped(pid)
            self._hold(pid, engine)

    def _strike_late(self, engine: Child) -> None:
        """The work did not pass the failpoint often enough: the victim is idle when it happens."""
        if self._is_struck:
            return
        self.counts["struck when idle"] += 1
        self.counts[f"idle: {self._plan.place.victim} {self._plan.place.failpoint}"] += 1
        victim = self._plan.place.victim
        try:
            pid = engine.pid if victim == "engine" else self._world.pid_of(victim)
            if self._plan.ending == "kill":
                self._kill(victim, engine)
            else:
                os.kill(pid, signal.SIGSTOP)
                self._hold(pid, engine)
        except ProcessLookupError:
            self.counts["dead before it was struck"] += 1

    def _hold(self, pid: int, engine: Child) -> None:
        """A process is stopped; after some time it goes on, or is killed."""
        plan = self._plan
        time.sleep(plan.held_s)
        if plan.also:
            self._kill(plan.also, engine)
        if plan.is_hung:
            self.counts["left to the daemon"] += 1
        elif plan.ending == "stop, kill":
            self._kill(plan.place.victim, engine)
        else:
            with contextlib.suppress(ProcessLookupError):  # the next daemon has killed this worker
                os.kill(pid, signal.SIGCONT)

    def _kill(self, role: str, engine: Child) -> None:
        self._dead.add(role)
        if role == "engine":
            os.kill(engine.pid, signal.SIGKILL)
        else:
            self._world.kill(role)

    # --- afterwards -------------------------------------------------------------------------------------------------

    def _recover(self, engine: Child) -> None:
        """The service manager starts the daemon again; an engine that lives goes on, or leaves."""
        if "daemon" in self._dead:
            self._world.await_daemon()
        if self._plan.loses_device:
            return
        self._world.await_well()
        engine_has_failed = self._plan.faulty == "engine" and self._plan.faults != "refused_registration=1"
        if "engine" in self._dead or engine_has_failed or not self._has_session:
            return
        if "daemon" in self._dead:
            if not self._plan.rejoins:
                return
            if not self._judge("rejoin", engine.ask("rejoin 0")):
                return
            self.counts["rejoins"] += 1
        self._judge("look", engine.ask(f"look {self._cached[0]}"))
        if self._judge("leave", engine.ask("leave 0")):
            self.counts["engines that went on"] += 1

    def _check(self) -> None:
        """A new engine hits all that was cached, where it was; whatever else it finds is right."""
        checker = self._engine()
        self._look_whole(checker)
        for number in [*self._worked, *self._read_again]:
            self._look(checker, number)
        self._ask(checker, f"compute {self._worked[0]}")
        self._ask(checker, "settle 0")
        self._look(checker, self._worked[0], whole=True)
        self._leave(checker)

    def _check_nothing_is_left(self) -> None:
        world = self._world
        world.await_nothing_held()
        self.failures += [f"violated: {each}" for each in world.violations()]
        if (granules := live_granules(world.device)) != _POOL_GRANULES:
            self.failures.append(f"{granules} granules are alive")
        if not self._plan.faults and (broken := world.broken_rules()):
            self.failures.append(f"rules of the driver: {broken}")

    def _bring_back(self) -> None:
        """The device comes back, whoever loses it yet; in the end nobody is there who still would."""

        def back() -> None:
            was_lost = bring_back(self._world.device, keeps_memory=self._plan.keeps_memory)
            self.counts["devices that were lost and came back"] += was_lost

        self._world.forget_prepared()
        self._world.await_well(back)
        self._world.renew_worker(back)

    def _check_without_device(self) -> None:
        """The device is gone for all processes: the daemon answers, and what the host pool has is right."""
        until(lambda: self._world.violations() == (), "no answer without the device")
        if self._plan.mode == "offload":
            checker = self._engine("offload on cpu")
            for number in self._cached:
                self._look(checker, number, whole=True)
            self._leave(checker)

    def _look_whole(self, engine: Child) -> None:
        """All cached prompts; in managed mode nothing is copied for them."""
        self._world.await_no_copies()
        before = self._world.copies()
        for number in self._cached:
            self._look(engine, number, whole=True)
        if self._plan.mode == "managed" and not self._plan.empties_device and (copies := self._world.copies() - before):
            self.failures.append(f"{copies} copies for blocks that are on the device")

    def _look(self, engine: Child, number: int, *, whole: bool = False) -> None:
        said = self._ask(engine, f"look {number}")
        if (found := _LOOK.fullmatch(said)) is None:
            return
        hit, ready, _ = map(int, found.groups())
        self.counts["blocks compared"] += hit
        if self._plan.empties_device:
            ready = hit
        if whole and (hit, ready) != (BLOCKS[self._plan.mode],) * 2:
            raise Wrong(f"prompt {number} was cached: {said}")

    # --- words ------------------------------------------------------------------------------------------------------

    def _ask(self, engine: Child, line: str) -> str:
        """An answer that must be none of failure."""
        said = engine.ask(line)
        if not self._judge(line, said):
            raise Wrong(f"{line} in peace: {said!r}")
        return said

    def _leave(self, engine: Child) -> None:
        self._ask(engine, "leave 0")
        engine.kill()

    def _judge(self, line: str, said: str) -> bool:
        """Whether it went well; wrong bytes and crashes are failures in any case."""
        self.counts["requests"] += 1
        if said.startswith("refused "):
            self.counts[said.split(":", maxsplit=1)[0]] += 1
            return False
        if not said:
            if "engine" not in self._dead:
                raise Wrong(f"the engine has died at {line!r}")
            self.counts["engine died"] += 1
            return False
        wrong = re.search(r"wrong (\d+)", said)
        if said.startswith("crashed") or (wrong and wrong[1] != "0"):
            raise Wrong(f"{line}: {said}")
        return True


def play_start(plan: Plan, library: Path) -> list[str]:
    """A daemon on a device that refuses memory does not start, says why, and leaves nothing; returns what is wrong."""
    with (
        device_directory() as device,
        folder_of_processes() as folder,
        driver_environment(library, device, folder, seed=plan.seed, faults=plan.faults),
    ):
        path = folder / "kvcached.toml"
        path.write_text(BOTH_MODES)
        command = [sys.executable, "-m", "kvcached", "serve", "--config", str(path), "--run-dir", str(folder / "run")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        wanted = {"out_of_memory": "CUDA_ERROR_OUT_OF_MEMORY", "refused_export": "CUDA_ERROR_NOT_PERMITTED"}
        failures = [] if done.returncode == 3 else [f"exit status {done.returncode}"]
        if wanted[plan.faults.partition("=")[0]] not in done.stderr:
            failures.append(f"it does not say why: {done.stderr[-500:]}")
        if granules := live_granules(device):
            failures.append(f"{granules} granules are alive")
        return failures
