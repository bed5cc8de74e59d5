"""Makes each mistake in turn, and checks that the test named for it notices.

    python -m tests.mutants.run [--passed] [--part K/N] [NAME...]

First the tests run without a mistake, and must pass; not with `--passed`, which says that they have. Then each mistake
is made in the processes of its own test, which must fail; two run at a time. One line per mutant, with its seconds;
exit status 1 if a test fails without its mutant, or if a mutant survives. A part is every Nth mutant, from the Kth on.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants import (
    batches,
    client,
    connector,
    copies,
    core,
    cuda,
    deployment,
    events,
    monitoring,
    offload,
    recovery,
    s3,
    server,
    service,
    sglang,
    storage,
    store_waits,
    tenants,
    tiers,
    vllm_groups,
    vllm_states,
    warm,
    warm_on_device,
    worker,
)
from tests.mutants.mutant import VARIABLE, Mutant
from tests.parts import part

ROOT = Path(__file__).parents[2]
AREAS = (
    batches,
    client,
    connector,
    copies,
    core,
    cuda,
    deployment,
    monitoring,
    events,
    offload,
    recovery,
    s3,
    server,
    service,
    sglang,
    storage,
    store_waits,
    tenants,
    tiers,
    vllm_groups,
    vllm_states,
    warm,
    warm_on_device,
    worker,
)
#: A folder that each process finds in which the mistake is made.
EVERY_PROCESS = Path(__file__).parent / "every_process"
AT_ONCE = 2
#: Of one test. A mutant that hangs its test has been noticed too.
TEST_SECONDS_MAX = 60
#: pytest's exit status when tests ran, and some failed.
TESTS_FAILED = 1


def mutants() -> list[Mutant]:
    """All of them, as they are written."""
    return [each for area in AREAS for each in vars(area).values() if isinstance(each, Mutant)]


def run_tests(tests: Iterable[str], *options: str, mutant: Mutant | None = None) -> int:
    """Pytest's exit status.

    Raises:
        subprocess.TimeoutExpired: with the mutant it did not end.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if mutant is not None:
        environment[VARIABLE] = mutant.address
        environment["PYTHONPATH"] += os.pathsep + str(EVERY_PROCESS)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "", *options, *tests]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    ) as running:
        try:
            return running.wait(None if mutant is None else TEST_SECONDS_MAX)
        finally:
            with contextlib.suppress(ProcessLookupError):  # what a test that hangs has started would go on
                os.killpg(running.pid, signal.SIGKILL)


def outcome(mutant: Mutant) -> tuple[str, float]:
    """What became of a mutant, and after how many seconds."""
    start_s = time.monotonic()
    try:
        status = run_tests([mutant.test], mutant=mutant)
    except subprocess.TimeoutExpired:
        status = TESTS_FAILED
    seconds = time.monotonic() - start_s
    if status == TESTS_FAILED:
        return "caught", seconds
    return "SURVIVED" if status == 0 else f"pytest ended with {status}", seconds


def main(arguments: list[str]) -> int:
    """Make all mistakes, or those named."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=__doc__)
    parser.add_argument("--passed", action="store_true", help="the tests have passed without a mistake")
    parser.add_argument(
        "--part", default="0/1", type=part, metavar="K/N", help="every Nth mutant from the Kth on (default: all)"
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a mutant (default: all)")
    options = parser.parse_args(arguments)
    known = {mutant.name: mutant for mutant in mutants()}
    if unknown := [name for name in options.names if name not in known]:
        sys.stdout.write(f"no such mutant: {', '.join(unknown)}\n")
        return 1
    chosen = [known[name] for name in options.names or known][options.part]
    tests = sorted({mutant.test for mutant in chosen})
    if status := 0 if options.passed else run_tests(tests, "--numprocesses", str(AT_ONCE), "--dist", "loadfile"):
        sys.stdout.write(f"without a mutant the tests must pass; pytest ended with {status}\n")
        return 1
    bad = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for mutant, (result, seconds) in zip(chosen, pool.map(outcome, chosen), strict=True):
            bad += result != "caught"
            sys.stdout.write(f"{result:<10}{seconds:4.0f} s {mutant.name}: {mutant.breaks}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - bad} of {len(chosen)} mutants caught\n")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
