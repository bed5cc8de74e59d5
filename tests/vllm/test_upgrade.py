"""Two models on one node want more host memory than there is: a rolling upgrade, and a model with a floor."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.project.source_tree import ROOT
from tests.vllm.cache_daemon import CacheDaemon
from tests.vllm.completions import BLOCK_SIZE, Completion
from tests.vllm.conftest import Prompts
from tests.vllm.server import VllmServer, ended, interpreter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

#: Of 1 MiB. A slab has room for 31 blocks of the tiny model.
SLABS = 16
SLAB_BLOCKS = 31
#: Of a prompt. vLLM computes the last block itself.
BLOCKS = 9
#: Prompts that fill the pool more than once.
FLOOD = SLABS * SLAB_BLOCKS // BLOCKS + 15
#: Prompts for which this part of the pool is enough, less the slab that a namespace may be short of, and one for blocks
#: on their way.
REST = (SLABS // 4 - 2) * SLAB_BLOCKS // BLOCKS
HALF = (SLABS // 2 - 2) * SLAB_BLOCKS // BLOCKS
MOST = (SLABS * 3 // 4 - 2) * SLAB_BLOCKS // BLOCKS
#: Whole slabs are taken from a model. The slabs that it has used least may hold a few of its newest blocks.
WHOLE_SLABS = 0.9
QUOTA = """
[[host.quota.namespace]]
label = "promised*"
floor_percent = 75
"""


class Servers(NamedTuple):
    """A model before and after an upgrade. The daemon of both is at `run_dir`, as soon as a test starts it there."""

    old: VllmServer
    new: VllmServer
    directory: Path


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Servers]:
    """Both, ready."""
    directory = tmp_path_factory.mktemp("upgrade")
    subprocess.run([interpreter(), ROOT / "tests/vllm/tiny_model.py", directory, "--seed", "2"], check=True)
    models_of = {"old": models / "model", "new": (directory / "model").rename(directory / "promised")}
    run_dir = CacheDaemon(directory).run_dir
    with contextlib.ExitStack() as stack:
        old, new = (
            stack.enter_context(ended(VllmServer(directory, name, model, run_dir=run_dir)))
            for name, model in models_of.items()
        )
        yield Servers(old.wait_until_ready(), new.wait_until_ready(), directory)


@contextlib.contextmanager
def daemon(servers: Servers, quota: str = "") -> Iterator[CacheDaemon]:
    """A daemon for both, empty, and with sessions of both."""
    started = CacheDaemon(servers.directory, slabs=SLABS, tables=quota)
    started.start()
    try:
        started.until_sessions(2)
        yield started
        started.until_idle()
    finally:
        started.stop()


def played(server: VllmServer, prompts: Sequence[list[int]]) -> list[Completion]:
    """The answers to prompts, none of them from vLLM's own cache."""
    server.forget()
    answers = [server.complete(tokens) for tokens in prompts]
    server.forget()  # when it may, its stores are over
    return answers


def assert_hits(
    server: VllmServer, prompts: Sequence[list[int]], answers: Sequence[Completion], *, share: float = 1.0
) -> None:
    """At least this share of the prompts' blocks but the last ones is hit, and every answer is as before."""
    again = played(server, prompts)
    assert again == list(answers)
    assert sum(each.cached_tokens for each in again) >= share * (BLOCKS - 1) * BLOCK_SIZE * len(prompts)


def test_floor_is_kept(servers: Servers, prompt: Prompts) -> None:
    """A model with a floor of three quarters of the pool keeps as many blocks while another one overflows the pool."""
    old, new, _ = servers
    with daemon(servers, QUOTA):
        mine = [prompt(BLOCKS, number) for number in range(MOST)]
        answers = played(new, mine)
        flood = [prompt(BLOCKS, f"flood {number}") for number in range(FLOOD)]
        others = played(old, flood)
        assert_hits(new, mine, answers)
        assert_hits(old, flood[-REST:], others[-REST:])


def test_rolling_upgrade(servers: Servers, prompt: Prompts) -> None:
    """A new version of a model gets half of a full pool at once, and the old version keeps half."""
    old, new, _ = servers
    with daemon(servers):
        flood = [prompt(BLOCKS, number) for number in range(FLOOD)]
        of_old, of_new = played(old, flood), played(new, flood)
        assert all(one.tokens != other.tokens for one, other in zip(of_old, of_new, strict=True))
        assert_hits(new, flood[-HALF:], of_new[-HALF:])
        assert_hits(old, flood[-HALF:], of_old[-HALF:], share=WHOLE_SLABS)
