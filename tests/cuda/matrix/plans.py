"""What happens under a seed: mode, process, failpoint and ending, and errors and delays of the driver."""

from __future__ import annotations

from random import Random
from typing import Final, NamedTuple


class Place(NamedTuple):
    """A failpoint that a process passes in the work of a seed.

    Attributes:
        mode: "managed" or "offload".
        victim: "engine", "worker" or "daemon".
        failpoint: of `kvcached_client.failpoints`.
        passes: how often the work passes it, at least about.
    """

    mode: str
    victim: str
    failpoint: str
    passes: int = 1


PLACES: Final = (
    Place("managed", "engine", "client.acquired", 4),
    Place("managed", "engine", "client.commit", 2),
    Place("managed", "engine", "client.sent", 6),
    Place("managed", "engine", "client.load", 2),
    Place("managed", "worker", "worker.store.begin", 2),
    Place("managed", "worker", "blocks.store.cleared", 2),
    Place("managed", "worker", "blocks.copy", 6),
    Place("managed", "worker", "blocks.store.copied", 2),
    Place("managed", "worker", "blocks.store.header", 6),
    Place("managed", "worker", "worker.store.written", 2),
    Place("managed", "worker", "worker.ack", 4),
    Place("managed", "worker", "worker.load.begin", 2),
    Place("managed", "worker", "worker.load.copied", 2),
    Place("managed", "daemon", "daemon.request", 9),
    Place("managed", "daemon", "daemon.reply", 9),
    Place("managed", "daemon", "daemon.order", 3),
    Place("offload", "engine", "offload.store.prepared", 2),
    Place("offload", "engine", "blocks.store.cleared", 2),
    Place("offload", "engine", "blocks.copy", 12),
    Place("offload", "engine", "blocks.store.copied", 2),
    Place("offload", "engine", "blocks.store.header", 12),
    Place("offload", "engine", "offload.store.written", 2),
    Place("offload", "engine", "offload.load.prepared", 2),
    Place("offload", "engine", "offload.load.copied", 2),
    Place("offload", "daemon", "daemon.request", 14),
    Place("offload", "daemon", "daemon.reply", 14),
    Place("offload", "daemon", "daemon.ledger.write", 3),
    Place("offload", "daemon", "daemon.ledger.written", 3),
    Place("managed", "daemon", "daemon.attach", 1),
    Place("offload", "daemon", "daemon.attach", 1),
)
#: What becomes of the process: SIGKILL; SIGSTOP and later SIGCONT; SIGSTOP and later SIGKILL.
ENDINGS: Final = ("kill", "go on", "stop, kill")
#: Who else is killed while the process is stopped, or with it: mostly nobody.
ALSO: Final = {"engine": ("worker", "daemon"), "worker": ("engine", "daemon"), "daemon": ("engine", "worker")}
_ALSO_SHARE: Final = 0.25
#: Of seeds with a device pool, how many begin with a pool that is full; of workers that stay stopped, how many hang.
_CROWD_SHARE: Final = 0.2
_HUNG_SHARE: Final = 0.3
#: Faults of the driver in one process of the mode: of the engine, or of the worker.
_QUIET_SHARE: Final = 0.5
DELAYS_US: Final = (0, 200, 2000)
#: One of so many seeds is about a daemon that starts where the device refuses memory.
START_EVERY: Final = 25
START_ERRORS: Final = ("out_of_memory=@1", "refused_export=@1")
#: The device is lost in one of so many seeds, and comes back: processes from before never have it again.
LOST_EVERY: Final = 40


class Plan(NamedTuple):
    """What happens under one seed.

    Attributes:
        at: the pass of the failpoint.
        also: another process that is killed with the victim, or while it is stopped; "" if none is.
        held_s: how long the victim is stopped.
        faulty: the process whose driver makes errors; "" if none does.
        faults: as `FAKE_CUDA_FAULTS` takes them.
        delay_us: as `FAKE_CUDA_DELAY_US`.
        rejoins: whether an engine that outlives the daemon goes on with the next one.
        crowds: the engine first holds every slot of the pool, and wants more.
        is_hung: nobody but the daemon ends the victim, a worker that is stopped.
        keeps_memory: a device that was lost comes back with what it held.
    """

    seed: int
    place: Place
    ending: str
    at: int
    also: str
    held_s: float
    faulty: str
    faults: str
    delay_us: int
    rejoins: bool
    crowds: bool
    is_hung: bool
    keeps_memory: bool

    @property
    def mode(self) -> str:
        return self.place.mode

    @property
    def is_early(self) -> bool:
        """The failpoint is passed when the engine connects."""
        return self.place.failpoint in {"daemon.attach", "daemon.ledger.write", "daemon.ledger.written"}

    @property
    def is_start(self) -> bool:
        """It is about a daemon that cannot start."""
        return self.faulty == "maker"

    @property
    def loses_device(self) -> bool:
        return "device_lost" in self.faults

    @property
    def empties_device(self) -> bool:
        """What was cached may be in the host pool alone afterwards: others have its slots, or the memory is gone."""
        return self.crowds or (self.loses_device and not self.keeps_memory)

    def __str__(self) -> str:
        if self.is_start:
            return f"seed {self.seed}: a daemon starts, {self.faults}"
        what = f"seed {self.seed}: {self.mode}, {self.place.victim} at {self.place.failpoint}@{self.at}: {self.ending}"
        also = f", {self.also} killed" if self.also else ""
        also += ", by the daemon" * self.is_hung + ", every slot held" * self.crowds
        return f"{what}{also}, {self.faulty} {self.faults or 'no errors'}, delays up to {self.delay_us} us"


def plan_of(seed: int) -> Plan:
    """The plan of a seed. Seeds that follow each other go through all places, and then through all endings."""
    random = Random(f"matrix/{seed}")
    place = PLACES[seed % len(PLACES)]
    ending = ENDINGS[(seed // len(PLACES)) % len(ENDINGS)]
    also = random.choice(ALSO[place.victim]) if random.random() < _ALSO_SHARE else ""
    faulty, faults = _driver_errors(seed, place.mode, random)
    if place.mode == "offload" and also == "worker":
        also = ""  # it has no part in offload mode
    return Plan(
        seed=seed,
        place=place,
        ending=ending,
        at=random.randint(1, place.passes),
        also=also,
        held_s=random.choice((0.0, 0.01, 0.05, 1.5) if random.random() < 0.1 else (0.0, 0.01, 0.05)),
        faulty=faulty,
        faults=faults,
        delay_us=random.choice(DELAYS_US),
        rejoins=random.random() < 0.5,
        crowds=place.mode == "managed" and random.random() < _CROWD_SHARE,
        is_hung=(place.victim, ending, also) == ("worker", "stop, kill", "") and random.random() < _HUNG_SHARE,
        keeps_memory=random.random() < 0.5,
    )


def _driver_errors(seed: int, mode: str, random: Random) -> tuple[str, str]:
    if seed % START_EVERY == 0:
        return "maker", START_ERRORS[seed // START_EVERY % len(START_ERRORS)]
    faulty = random.choice(("engine", "worker")) if mode == "managed" else "engine"
    if seed % LOST_EVERY == 1:
        return faulty, f"device_lost=@{random.randint(10, 50)}"
    if random.random() < _QUIET_SHARE:
        return "", ""
    errors = ["launch_failure", "refused_registration", *(["out_of_memory"] if mode == "offload" else [])]
    error = random.choice(errors)
    return faulty, f"launch_failure=@{random.randint(1, 12)}" if error == "launch_failure" else f"{error}=1"
