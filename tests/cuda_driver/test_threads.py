from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.cuda_driver import build
from tests.cuda_driver.device import settings

HERE = Path(__file__).parent
#: What gcc and clang say where the library of the sanitizer is not installed.
NO_SANITIZER = ("libtsan", "clang_rt.tsan", "-fsanitize=thread")


@pytest.mark.slow
def test_threads_share_the_driver_without_a_race(library: Path, device: Path, tmp_path: Path) -> None:
    """Four threads that use streams, events, values and copies at once make the thread sanitizer find nothing."""
    try:
        program = build.build_program(tmp_path / "stress", HERE / "stress.c", "-fsanitize=thread")
    except RuntimeError as error:
        if any(word in str(error) for word in NO_SANITIZER):
            pytest.skip("the compiler has no thread sanitizer")
        raise
    environment = {**os.environ, **settings(directory=device, delay_us=200, trace=tmp_path / "trace")}
    done = subprocess.run([program], env=environment, capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
