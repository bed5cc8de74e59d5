from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvcached_client
from kvcached_client import KvcachedError
from tests.project.daemon_process import clean_environment, running_daemon
from tests.project.source_tree import ROOT

GUIDE = (ROOT / "docs/sdk.md").read_text()
(CONFIG,) = re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL)
FRAGMENTS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
#: Each program with the output that the page shows next.
PROGRAMS = re.findall(r"```python complete\n(.*?)```.*?```text\n(.*?)```", GUIDE, re.DOTALL)

#: What the fragments take for granted, and what shows that they did what the page says.
BEFORE = """
from kvcached_client import Client, SessionGrant, map_pool
layout, scale_bytes, prompt = None, 12, range(10)
"""
AFTER = """
print(keys.shape, scales.shape, lease.capacity_tokens)
pool.close()
client.close()
"""


def output_of(program: str, config: str, directory: Path) -> tuple[str, str]:
    """What a program prints to stdout and stderr, beside a daemon of its own."""
    path = directory / "tiny.toml"
    path.write_text(config)
    with running_daemon(path, directory / "run"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={**clean_environment(), "KVCACHED_RUN_DIR": str(directory / "run")},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    return done.stdout, done.stderr


def test_guide_has_programs_and_shows_their_output() -> None:
    """Every block marked complete is followed by the output that it is compared with."""
    assert len(PROGRAMS) == GUIDE.count("```python complete") == GUIDE.count("```text") >= 1


@pytest.mark.parametrize(("program", "expected"), PROGRAMS, ids=range(len(PROGRAMS)))
def test_guide_program_prints_what_the_page_shows(program: str, expected: str, tmp_path: Path) -> None:
    """A complete program of the guide, beside a daemon with the guide's configuration, prints what the page says."""
    assert output_of(program, CONFIG, tmp_path) == (expected, "")


def test_guide_fragments_run_in_their_order(tmp_path: Path) -> None:
    """The guide's fragments, one after the other, make a session, map a pool with scales and get a lease."""
    config = CONFIG + "scale_bytes = 12\n"

    assert output_of(BEFORE + "".join(FRAGMENTS) + AFTER, config, tmp_path) == ("(32, 4, 1, 8) (32, 12) 76\n", "")


def test_guide_says_what_to_do_for_every_error() -> None:
    """The table of errors names exactly the exceptions that an engine can catch, without their base classes."""
    kinds = [kind for kind in vars(kvcached_client).values() if isinstance(kind, type)]
    errors = {kind.__name__ for kind in kinds if issubclass(kind, KvcachedError) and not kind.__subclasses__()}
    (table,) = re.findall(r"\n\| error \|.*?\n\n", GUIDE, re.DOTALL)
    first_cells = "".join(row.split("|")[1] for row in table.splitlines()[3:] if row)

    assert set(re.findall(r"`(\w+)`", first_cells)) == errors
