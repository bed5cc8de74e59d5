"""Lets vLLM's own scheduler serve and die on memory that outlives it, and tells what was seen.

    python -P -m tests.vllm.scheduler [--seeds FROM TO] [--kinds NAME ...] [--faults NAME ...]

Each kind of model has some engines for each seed, one after the other. stdout gets a JSON object for each kind, and for
each fault, a mistake that is to be found: its `name`, what was `seen`, and the `failure`, empty if there was none.
Exit code 1 if a kind failed, or a fault was not found. Runs in vLLM's environment; PYTHONPATH has the checkout.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest import mock

from kvcached_client.vllm.scheduling.device_blocks import DeviceBlocks
from kvcached_client.vllm.scheduling.stores import Stores
from tests.vllm.scheduler.model import Layers, Model, write_config

LIVES = 6
#: Things that happen in a life, at most.
THINGS = 300
BLOCKS = (30, 60, 120)
WINDOW = 11
#: Of vLLM; with priorities it has no cache of its own, without which the connector refuses states.
POLICIES = ("fcfs", "fcfs", "priority")

KINDS = {
    "full attention": Model([Layers("full", 4)]),
    "windows": Model([Layers("full", 4), Layers("window", 4, WINDOW)]),
    "windows in larger blocks": Model([Layers("full", 4), Layers("window", 8, WINDOW)]),
    "full attention in larger blocks": Model([Layers("full", 8), Layers("window", 4, WINDOW)]),
    "windows only": Model([Layers("window", 4, WINDOW)]),
    "chunks": Model([Layers("full", 4), Layers("chunk", 4, 16)]),
    "states": Model([Layers("full", 4), Layers("state", 4)]),
    "two groups of states": Model([Layers("full", 8), Layers("state", 8), Layers("state", 8)]),
    "states in larger blocks": Model([Layers("full", 4), Layers("state", 8)]),
    "states and windows": Model([Layers("full", 4), Layers("state", 8), Layers("window", 4, WINDOW)]),
    "states kept inside a step": Model([Layers("full", 4), Layers("state", 4, keeps_middle=True)]),
    "hits inside blocks of states": Model([Layers("full", 8), Layers("state", 8)], match_unit=4),
    "drafts": Model([Layers("full", 4)], drafts=3),
}

_step = DeviceBlocks.step


def _named_at_once(blocks: DeviceBlocks, step: object) -> int:
    number = _step(blocks, step)  # type: ignore[arg-type]
    blocks.computed(number)
    return number


#: Mistakes, each with a kind of model by which it is found.
FAULTS: dict[str, tuple[str, Callable[[], AbstractContextManager[object]]]] = {
    "blocks named before they are computed": (
        "windows",
        lambda: mock.patch.object(DeviceBlocks, "step", _named_at_once),
    ),
    "blocks of before a clear named after it": (
        "full attention",
        lambda: mock.patch.object(DeviceBlocks, "_epoch_behind", lambda blocks, *_: blocks._table.epoch),
    ),
    "blocks not held until they are stored": (
        "windows",
        lambda: mock.patch.multiple(Stores, hold=lambda *_: None, free=lambda *_: None),
    ),
    "blocks held without end": ("states", lambda: mock.patch.object(Stores, "free")),
}


def main() -> int:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.scheduler")
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 3), metavar=("FROM", "TO"), help="default: 0 3")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS, help="default: all", metavar="NAME")
    parser.add_argument(
        "--faults", nargs="*", default=list(FAULTS), choices=FAULTS, help="default: all", metavar="NAME"
    )
    options = parser.parse_args()
    seeds = range(*options.seeds)
    is_right = True
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(Path(folder))
        for kind in options.kinds:
            is_right &= not tell(kind, kind, config, seeds, nullcontext())
        for fault in options.faults:
            kind, mistake = FAULTS[fault]
            is_right &= bool(tell(fault, kind, config, range(seeds.start, seeds.start + 20), mistake()))
    return 0 if is_right else 1


def tell(name: str, kind: str, config: Path, seeds: range, mistake: AbstractContextManager[object]) -> str:
    """Run engines, and print what came of it; the failure."""
    seen: Counter[str] = Counter()
    failure = ""
    with mistake:
        for seed in seeds:
            try:
                run(kind, config, seed, seen)
            except AssertionError as error:
                failure = f"seed {seed}: {error}"
                traceback.print_exc()
                break
    sys.stdout.write(json.dumps({"name": name, "seen": seen, "failure": failure}) + "\n")
    sys.stdout.flush()
    return failure


def run(kind: str, config: Path, seed: int, seen: Counter[str]) -> None:
    """Engines on the same memory, one after the other, each of which is killed; the last one answers everything."""
    from tests.vllm.scheduler.world import Remains, SchedulerWorld  # noqa: PLC0415 - needs vLLM

    rng, model = random.Random(seed), KINDS[kind]
    blocks, policy = rng.choice(BLOCKS), rng.choice(POLICIES)
    remains = Remains(model, blocks, policy="fcfs" if model.has_states else policy)
    for life in range(LIVES + 1):
        world = SchedulerWorld(seed * 1000 + life, config, remains)
        try:
            if life < LIVES:
                world.live_and_die(THINGS)
            else:
                world.serve_all(THINGS // 3)
        finally:
            seen += world.seen
            seen += Counter(
                adopted=world.adopted,
                answers=len(world.vllm.outputs),
                preemptions=world.vllm.preemptions,
                loads_failed=world.vllm.loads_failed,
            )


if __name__ == "__main__":
    sys.exit(main())
