"""One seed from its beginning to its end."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass

from tests.simulation.scheduler import Broken
from tests.simulation.storage_tier import simulated
from tests.simulation.world import World


@dataclass(frozen=True)
class Result:
    """What became of a seed.

    Attributes:
        reboots: the machine is restarted now and then.
        sleeps: device pools are sent to sleep now and then.
        events: that happened.
        failure: what was wrong; empty where nothing was.
        digest: of the whole history.
        virtual_ms: simulated time.
        operations: requests that the daemon served.
    """

    seed: int
    steps: int
    reboots: bool
    sleeps: bool
    events: int
    failure: str
    digest: str
    virtual_ms: int
    operations: int
    seen: Counter[str]
    history: list[str]

    @property
    def reproduction(self) -> str:
        """The command that shows the same again."""
        kind = " --reboots" * self.reboots + " --sleeps" * self.sleeps
        return f"python -m tests.simulation --seed {self.seed} --steps {self.steps}{kind}"

    def report(self) -> str:
        """A failure in words."""
        return f"seed {self.seed} fails at event {self.events}: {self.failure}\nreproduce: {self.reproduction} --trace"


def run(seed: int, steps: int, *, reboots: bool = False, sleeps: bool = False) -> Result:
    """Play a seed: `steps` events with faults, and then what it takes to an end in peace."""
    world = World(seed, reboots=reboots, sleeps=sleeps)
    failure = ""
    with world.tripwire.stretched(), simulated(world):
        try:
            world.safety(steps)
            world.liveness()
        except Broken as error:
            failure = str(error)
        except Exception:  # noqa: BLE001 - whatever the product raises on its own is a failure, too
            failure = traceback.format_exc()
    for process in world.processes:
        process.forget()
    counters = world.counters + world.daemon.cache.counters
    seen = world.seen + Counter({f"counter: {name}": number for name, number in counters.items()})
    return Result(
        seed,
        steps,
        reboots,
        sleeps,
        world.scheduler.count,
        failure,
        world.scheduler.digest,
        world.scheduler.now_us // 1000,
        counters["requests"],
        seen,
        list(world.scheduler.history),
    )
