"""Chaos runs: real processes, faults by seed, and every byte of every hit compared.

    python -m tests.chaos --seeds 1:21 --seconds 240

Each seed makes its own choices of configuration, prompts and faults; how these meet is up to the machine.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.faults import SCENES
from tests.chaos.run import Outcome, Run, least

_FAILURE_LENGTH_MAX = 700
_LONG_S = 120
#: What every long run must have had.
_KINDS = ("compared device", "compared host", "compared layer by layer", "compared offload", "rejoins")


def main() -> int:
    """Play the seeds one after the other; 1 where one failed."""
    arguments = _arguments()
    first, _, end = arguments.seeds.partition(":")
    failed, scenes = 0, arguments.scene or list(SCENES)
    for seed in range(int(first), int(end or int(first) + 1)):
        directory = Path(tempfile.mkdtemp(prefix=f"chaos-{seed}-", dir=arguments.directory))
        outcome = Run(seed, arguments.seconds, scenes, directory).play()
        _check_worth(outcome, arguments.seconds, scenes)
        _print(outcome, directory)
        failed += bool(outcome.failures)
        if not outcome.failures and not arguments.keep:
            shutil.rmtree(directory)
    return int(failed > 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", default="1:2", help="first:end, or one")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--scene", action="append", choices=SCENES, help="only these faults; all without it")
    parser.add_argument("--directory", default=None, help="where files go")
    parser.add_argument("--keep", action="store_true", help="keep the files of good runs, too")
    return parser.parse_args()


def _check_worth(outcome: Outcome, seconds: float, scenes: list[str]) -> None:
    """A run that has tested next to nothing has failed."""
    compared_min, faults_min = least(seconds, scenes)
    if outcome.compared < compared_min:
        outcome.failures.append(f"only {outcome.compared} blocks were compared, not {compared_min:.0f}")
    if outcome.fault_count < faults_min:
        outcome.failures.append(f"only {outcome.fault_count} faults were played, not {faults_min:.0f}")
    if len(scenes) == len(SCENES) and seconds >= _LONG_S:
        outcome.failures += [f"nothing for {kind!r}" for kind in _KINDS if not outcome.counts[kind]]


def _print(outcome: Outcome, directory: Path) -> None:
    verdict = "FAILED" if outcome.failures else "good"
    _say(
        f"{time.strftime('%H:%M:%S')} seed {outcome.seed}: {verdict}; {outcome.compared} blocks compared, "
        f"{outcome.fault_count} faults"
    )
    _say(f"  counts: {dict(sorted(outcome.counts.items()))}")
    _say(f"  faults: {dict(sorted(outcome.faults.items()))}")
    for failure in outcome.failures[:8]:
        _say(f"  {failure[:_FAILURE_LENGTH_MAX]}")
    if outcome.failures:
        (directory / "failures").write_text("\n\n".join(outcome.failures))
        _say(f"  {len(outcome.failures)} failures; files in {directory}, the whole story in 'failures' there")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
