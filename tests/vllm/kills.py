"""Kills stock vLLM on memory of the daemon at random instants under load, many times in one run.

    python -m tests.vllm.kills [--kills 100] [--of-two-ranks 20] [--with-states 20] [--seed 1]

Engines of one rank are killed, then engines of two ranks, of which half lose one rank only, then engines of a model
that keeps states in two of three layers. After each kill the next engine adopts what is valid: its answers must be
those of stock vLLM, and it must find at least 95 % of the blocks of the prompts that were answered last. The controls
(`warm_controls`) follow. Before all that, engines that do not clear the rows of blocks that are overwritten are killed
until an answer is wrong. All engines schedule ahead, as on GPUs.

Progress goes to stderr, a summary as JSON to stdout. Exit status 1 if anything is not as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.project.source_tree import ROOT
from tests.vllm.completions import BLOCK_SIZE
from tests.vllm.server import interpreter
from tests.vllm.test_states import CONVOLUTIONS, WIDTH
from tests.vllm.warm_controls import Control, Controls, Trial
from tests.vllm.warm_loop import Groups, Outcome, WarmLoop

PROMPTS = 64
#: Of the blocks of the prompts that were answered last, how many the next engine finds.
SHARE_MIN = 0.95
#: Of the model that keeps states.
STATES = Groups(CONVOLUTIONS.family, BLOCK_SIZE, CONVOLUTIONS.options)
#: So often engines that do not clear rows are killed until an answer is wrong.
FAULTY_KILLS = 20


class Run:
    """Everything, one after the other.

    Args:
        folder: for models, logs and daemons.
        seed: of all that is random.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._seed = seed
        self._model = self._made("some", seed)
        self._others = self._made("other", seed + 1)
        script = ("-m", "tests.vllm.tiny_hybrid", folder / "kept", STATES.name, "--window", str(WIDTH))
        subprocess.run([interpreter(), *script], cwd=ROOT, check=True)
        self._with_states = folder / "kept/model"

    def one_rank(self, kills: int) -> dict[str, Any]:
        """Engines of one rank, and their controls."""
        with self._loop("one-rank") as loop:
            for number in range(kills):
                loop.kill_once(number)
                _tell(f"one rank {number + 1}/{kills}", loop.outcome)
            loop.finish()
            controls = Controls(loop, self._others)
            return _told(loop.outcome) | {
                "stale_epoch": _control(controls.stale_epoch()),
                "other_weights": _control(controls.other_weights()),
                "cleared": _trial(controls.cleared()),
            }

    def two_ranks(self, kills: int) -> dict[str, Any]:
        """Engines of two ranks, and their control."""
        with self._loop("two-ranks", ranks=2) as loop:
            for number in range(kills):
                loop.kill_once(number, is_one_rank=number % 4 > 1)
                _tell(f"two ranks {number + 1}/{kills}", loop.outcome)
            loop.finish()
            return _told(loop.outcome) | {"lost_rank": _control(Controls(loop, self._others).lost_rank())}

    def with_states(self, kills: int) -> dict[str, Any]:
        """Engines of a model that keeps states."""
        with self._loop("states", groups=STATES) as loop:
            for number in range(kills):
                loop.kill_once(number)
                _tell(f"states {number + 1}/{kills}", loop.outcome)
            loop.finish()
            return _told(loop.outcome) | {"stale_epoch": _control(Controls(loop, self._others).stale_epoch())}

    def without_invalidation(self) -> dict[str, Any]:
        """Engines that do not clear rows, until an answer is wrong."""
        with self._loop("without", faults=["keep_names"]) as loop:
            for number in range(FAULTY_KILLS):
                loop.kill_once(2 * number + 1)
                _tell(f"no invalidation {number + 1}", loop.outcome)
                if loop.outcome.wrong:
                    break
            outcome = loop.outcome
            return {"kills": outcome.kills, "answers": outcome.answers, "wrong": outcome.wrong, "ok": outcome.wrong > 0}

    @contextlib.contextmanager
    def _loop(
        self, name: str, *, ranks: int = 1, faults: Sequence[str] = (), groups: Groups | None = None
    ) -> Iterator[WarmLoop]:
        folder, model = self._folder / name, self._model if groups is None else self._with_states
        folder.mkdir()
        faults = [*faults, "async_scheduling"]
        loop = WarmLoop(folder, model, prompts=PROMPTS, ranks=ranks, seed=self._seed, faults=faults, groups=groups)
        with loop.running(folder):
            yield loop

    def _made(self, name: str, seed: int) -> Path:
        folder = self._folder / name
        program = ROOT / "tests/vllm/tiny_model.py"
        subprocess.run([interpreter(), program, folder, f"--seed={seed}"], check=True)
        return folder / "model"


def _tell(what: str, outcome: Outcome) -> None:
    sys.stderr.write(
        f"{what}: {outcome.answers} answers, {outcome.wrong} wrong, {outcome.adopted} adopted, {outcome.share:.4f}\n"
    )


def _told(outcome: Outcome) -> dict[str, Any]:
    told = dataclasses.asdict(outcome)
    warm_s = told.pop("warm_s")
    return told | {
        "share": round(outcome.share, 4),
        "first_answer_s": round(statistics.median(warm_s), 2) if warm_s else None,
        "ok": outcome.wrong == 0 and outcome.share >= SHARE_MIN,
    }


def _control(control: Control) -> dict[str, Any]:
    return dataclasses.asdict(control) | {"ok": control.is_right}


def _trial(trial: Trial) -> dict[str, Any]:
    return dataclasses.asdict(trial) | {"ok": trial.adopted == trial.wrong == 0}


def _is_ok(told: Any) -> bool:
    return not isinstance(told, dict) or (told.get("ok", True) and all(_is_ok(value) for value in told.values()))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--of-two-ranks", type=int, default=20)
    parser.add_argument("--with-states", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        run = Run(Path(folder), arguments.seed)
        summary: dict[str, Any] = {"seed": arguments.seed}
        for name, part in (
            ("no_invalidation", run.without_invalidation),
            ("one_rank", partial(run.one_rank, arguments.kills)),
            ("two_ranks", partial(run.two_ranks, arguments.of_two_ranks)),
            ("states", partial(run.with_states, arguments.with_states)),
        ):
            summary[name] = part()
            sys.stderr.write(json.dumps({name: summary[name]}) + "\n")
    ok = _is_ok(summary)
    sys.stdout.write(json.dumps(summary | {"ok": ok}, indent=2) + "\n")
    return int(not ok)


if __name__ == "__main__":
    sys.exit(main())
