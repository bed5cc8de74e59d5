"""Some seeds of the crash matrix, which pass each failpoint of a copy in each process."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from kvcached_client.failpoints import FAILPOINTS
from tests.cuda.matrix.plans import ENDINGS, PLACES, plan_of
from tests.cuda_driver import build
from tests.project.source_tree import ROOT

#: `python -m tests.cuda.matrix` plays more.
SEEDS = range(45, 82)


def test_seeds_cover_the_matrix() -> None:
    """Each place has a seed of the test below, and in a thousand each ending, with and without errors.

    So has each failpoint of a worker one that is left to hang, and each of a device pool one that is full.
    """
    few = {plan.place for plan in map(plan_of, SEEDS) if not plan.is_start}
    many = {(plan.place, plan.ending, bool(plan.faults)) for plan in map(plan_of, range(1, 1001)) if not plan.is_start}

    assert few == set(PLACES)
    assert {plan.place for plan in map(plan_of, range(1, 1001)) if plan.is_hung} == {
        place for place in PLACES if place.victim == "worker"
    }
    assert {plan.place for plan in map(plan_of, range(1, 1001)) if plan.crowds} == {
        place for place in PLACES if place.mode == "managed"
    }
    assert {place.failpoint for place in PLACES} <= set(FAILPOINTS)
    assert many == {(place, ending, errors) for place in PLACES for ending in ENDINGS for errors in (True, False)}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_byte_is_wrong_and_no_granule_is_left() -> None:
    """Whoever dies or stops at whichever step of a copy: every request is answered, and what was cached is hit."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    if build.compiler() is None:
        pytest.skip("no C compiler here: the fake CUDA driver cannot be built")
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda.matrix", "--seeds", f"{SEEDS[0]}-{SEEDS[-1]}"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=590, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout
    struck = re.search(r"(\d+) struck at the failpoint", done.stdout)
    assert struck is not None
    assert int(struck[1]) >= len(SEEDS) // 2, done.stdout
