from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from functools import cache

import pytest

from kvcached_client.protocol import engine as wire
from tests.simulation.__main__ import main
from tests.simulation.mistake import Mistake
from tests.simulation.mistakes import MISTAKES
from tests.simulation.plan import FAULTS
from tests.simulation.run import Result, run

STEPS = 2800
#: In every run of the tests.
SEEDS = (0, 1)
#: In those of `make full`: together with the others they show what is `EXPECTED`.
MORE_SEEDS = (4, 14, 15, 38, 49, 55, 61)
#: In those of `make slow`.
SLOW_SEEDS = range(100, 125)
SLOW_STEPS = 7000
#: What engines and operators say. The other verbs only ask.
VERBS = (
    wire.Acquire,
    wire.Allocate,
    wire.Bye,
    wire.Clear,
    wire.ClearNamespace,
    wire.Commit,
    wire.TransferDone,
    wire.Declare,
    wire.DeclareOver,
    wire.Drain,
    wire.Heartbeat,
    wire.Hello,
    wire.HelloOffload,
    wire.Load,
    wire.Match,
    wire.Pause,
    wire.Pin,
    wire.Prefetch,
    wire.PrepareLoad,
    wire.PrepareStore,
    wire.PrepareStores,
    wire.Rejoin,
    wire.Release,
    wire.Resume,
    wire.SetPolicy,
    wire.SetWeights,
    wire.StorageControl,
    wire.Unpin,
    wire.WaitForSlots,
)
#: In every run of the tests, with a machine that is restarted now and then.
REBOOT_SEEDS = (3, 5)
EXPECTED_OF_LIVES = (
    "machine restarted",
    "namespace of engines cleared by people",
    "machine restarted, and the ledger is gone",
    "storage was emptied",
    "the record of generations is lost",
    "blocks fetched that an earlier life of the daemon had stored",
    "verb: Clear",
    "verb: ClearNamespace",
    "verb: SetWeights",
)
#: In every run of the tests, with device pools that are sent to sleep now and then.
SLEEP_SEEDS = (1, 48)
EXPECTED_OF_SLEEPS = (
    "daemon started with a pool asleep",
    "events with a pool that is asleep",
    "events with a pool that is falling_asleep",
    "events with a pool that is waking",
    "memory of a sleeping pool that a dead daemon had not given back",
    "memory that could not be made",
    "refusal: asleep",
    "refusal: pool_busy",
    "verb: Sleep",
    "verb: Wake",
)
#: What has to have happened at some time, or the seeds do not test what they are there for.
EXPECTED = (
    *(f"fault: {name}" for name in FAULTS),
    "fault: message lost",
    "fault: message doubled",
    "fault: message late",
    "fault: message out of order",
    "offload loaded blocks",
    "offload stored blocks",
    "blocks fetched from storage",
    "blocks written to storage",
    "device block that survived its daemon, held by no lease",
    "host block that survived its daemon",
    "worker loaded blocks",
    "worker stored blocks",
    "device blocks read",
    "counter: demoted_blocks",
    "counter: evicted_blocks",
    "counter: host_evicted_blocks",
    "counter: duplicate_blocks",
    "counter: store_failed_blocks",
    "counter: load_failed_blocks",
    "counter: pins_ended",
    "counter: prefetched_blocks",
    "counter: reclaimed_slabs",
    "counter: sessions_expired",
    "counter: workers_lost",
    "deferred: Load",
    "deferred: Prefetch",
    "deferred: StorageControl",
    "deferred: WaitForSlots",
    "engine found corrupt blocks",
    "worker found corrupt blocks",
    "events with FENCED slots in a",
    "events with QUARANTINED slots in a",
    "events with QUARANTINED slots in host",
    "events with a retired tree",
    "hit cut short",
    "late copy called off",
    "late tick",
    "lease declared",
    "lease granted too late",
    "nothing left to come back to",
    "pause with copies under way at its deadline",
    "pinned blocks",
    "prompt acquired behind a known one",
    "prefetch without an answer",
    "prefetch: failed",
    "prefetch: fetched",
    "prefetch: nothing",
    "prefetch: stored",
    "prefetch: unavailable",
    "prefetch: waiting",
    "refusal: clearing",
    "refusal: draining",
    "refusal: paused",
    "refusal: pool_busy",
    "refusal: session_expired",
    "refusal: stale_epoch",
    "refusal: unknown_prefix",
    "request sent again",
    "retry of a kept request",
    "session expired in silence",
    "session found to be over",
    "session taken over",
    "storage call that failed",
    "store of another engine waited for",
    "storage order that hangs",
    "storage order: Forget",
    "storage order: Ping",
    "storage process died",
    "storage that cannot be opened",
    "unpinned",
    "worker died with commands waiting",
    "worker killed by its deadline",
    "device pool found after a restart",
    "device block that survived its worker",
    "worker outlived its daemon",
    "daemon started again",
    "drained",
    "engine came back to its leases",
    "engine came back with work queued",
    "engine found after a restart",
    "host blocks found after a restart",
    "workers restored",
    "zombie stored in the host pool",
    "zombie wrote to a device slot",
)


@cache
def played(seed: int, *, reboots: bool = False, sleeps: bool = False) -> Result:
    return run(seed, STEPS, reboots=reboots, sleeps=sleeps)


@pytest.mark.parametrize("seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.full) for seed in MORE_SEEDS)])
def test_nothing_is_wrong_and_everything_ends(seed: int) -> None:
    """Whatever fails, nobody reads other bytes or writes without a right; when faults cease, nothing is held."""
    result = played(seed)

    assert not result.failure, result.report()


@pytest.mark.parametrize("seed", REBOOT_SEEDS)
def test_nothing_that_was_cleared_comes_back_with_the_machine(seed: int) -> None:
    """Several lives of the machine with storage that lasts: no block of an earlier generation is read in a later one.

    What people and engines were told of clears and weights holds in every life.
    """
    result = played(seed, reboots=True)

    assert not result.failure, result.report()


def test_lives_of_the_machine_show_what_they_are_for() -> None:
    """Over these seeds the ledger is lost and kept, storage and record too, and blocks of earlier lives are read."""
    seen: Counter[str] = Counter()
    for seed in REBOOT_SEEDS:
        seen += played(seed, reboots=True).seen

    assert [name for name in EXPECTED_OF_LIVES if not seen[name]] == []


@pytest.mark.parametrize("seed", SLEEP_SEEDS)
def test_pools_that_sleep_and_wake_lose_nothing_that_was_promised(seed: int) -> None:
    """Pools are sent to sleep and woken while anybody dies: nobody uses memory that is not there.

    Each daemon has the pools asleep that the one before it had written down, and the others with their memory.
    """
    result = played(seed, sleeps=True)

    assert not result.failure, result.report()


def test_sleeping_pools_show_what_they_are_for() -> None:
    """Over these seeds pools sleep and wake, fail to wake, and are found asleep by the next daemon."""
    seen: Counter[str] = Counter()
    for seed in SLEEP_SEEDS:
        seen += played(seed, sleeps=True).seen

    assert [name for name in EXPECTED_OF_SLEEPS if not seen[name]] == []


@pytest.mark.full
def test_a_seed_is_one_history() -> None:
    """The same seed gives the same events at the same times, in another process, too, whatever its hashes are."""
    seed = SEEDS[0]
    program = f"from tests.simulation.run import run; print(run({seed}, {STEPS}).digest)"
    again = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert again.stdout.strip() == played(seed).digest
    assert played(seed).digest != played(SEEDS[1]).digest


@pytest.mark.full
def test_the_seeds_show_what_they_are_for() -> None:
    """Over these seeds each fault, each verb and each rare state has occurred."""
    seen: Counter[str] = Counter()
    for seed in (*SEEDS, *MORE_SEEDS):
        seen += played(seed).seen

    assert [name for name in EXPECTED if not seen[name]] == []
    assert [verb for verb in VERBS if not seen[f"verb: {verb.__name__}"]] == []


@pytest.mark.full
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_mistakes_are_found(mistake: Mistake) -> None:
    """A mistake in the product makes a seed fail."""
    with mistake.made():
        found = any(run(seed, STEPS, reboots=mistake.reboots, sleeps=mistake.sleeps).failure for seed in mistake.seeds)

    assert found


def test_a_failure_is_told_with_its_reproduction(capsys: pytest.CaptureFixture[str]) -> None:
    """A failing seed prints one line that shows it again, and playing it again fails at the same event."""
    mistake = next(each for each in MISTAKES if each.name == "retry executed twice")
    with mistake.made():
        assert main(["--seed", str(mistake.seeds[0]), "--steps", str(STEPS), "--trace", "3"]) == 1
        out, err = capsys.readouterr()
        again = run(mistake.seeds[0], STEPS)

    summary = json.loads(out)
    found = re.search(r"fails at event (\d+)", err)
    assert summary["failed"] == [f"python -m tests.simulation --seed {mistake.seeds[0]} --steps {STEPS}"]
    assert found is not None
    assert int(found[1]) == again.events
    assert summary["failed"][0] in err


@pytest.mark.slow
@pytest.mark.parametrize("seed", SLOW_SEEDS)
def test_more_lives(seed: int) -> None:
    """The same holds for longer runs with a machine that is restarted."""
    result = run(seed, SLOW_STEPS, reboots=True)

    assert not result.failure, result.report()


@pytest.mark.slow
@pytest.mark.parametrize("seed", SLOW_SEEDS[:6])
def test_more_sleeps(seed: int) -> None:
    """The same holds for longer runs with pools that sleep."""
    result = run(seed, SLOW_STEPS, sleeps=True)

    assert not result.failure, result.report()


@pytest.mark.slow
@pytest.mark.parametrize("seed", SLOW_SEEDS)
def test_more_seeds(seed: int) -> None:
    """The same holds for longer runs of other seeds."""
    result = run(seed, SLOW_STEPS)

    assert not result.failure, result.report()
