"""A host pool full of small blocks, and an engine that finds them again after its daemon was killed."""

from __future__ import annotations

import mmap
import os
import random
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from time import perf_counter, sleep
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.attached_rig import LayerTensor
from benchmarks.programs import daemon_process
from kvcached_client.blocks.pages import EnginePages
from kvcached_client.errors import TransportError
from kvcached_client.offload import OffloadClient, OffloadLayout, new_instance
from kvcached_client.offload_shard import OffloadShard
from kvcached_client.types import KEY_SIZE_BYTES, LeaseId

BLOCK_BYTES: Final = 512
_BLOCK_SIZE: Final = 16
#: Of one prompt: 16,384 tokens. Together they are a little more than a million blocks.
_PROMPT_BLOCKS: Final = 1024
PROMPTS: Final = 992
_SLAB_BYTES: Final = 64 << 20
_DEADLINE_MS: Final = 60_000
_PATIENCE_S: Final = 120
#: Between two tries to connect. Without it the engine would take a core from the daemon that it waits for.
_PAUSE_S: Final = 0.005


class Restart(NamedTuple):
    """What a SIGKILL of the daemon cost.

    Attributes:
        blocks: that the host pool held.
        first_hit_s: from the signal until the engine had read, and proved, the blocks of a whole prompt.
        usable: share of all blocks that a match finds afterwards.
    """

    blocks: int
    first_hit_s: float
    usable: float


def restart(directory: Path, prompts: int = PROMPTS) -> Restart:
    """Fill the host pool of a supervised daemon, kill the daemon, and look for everything again.

    Raises:
        RuntimeError: the daemon could not be started, or did not come back.
    """
    with _supervised(prompts, directory) as supervisor, FullPool(directory / "run", prompts) as pool:
        pool.fill()
        blocks = pool.hits()
        (daemon,) = map(int, Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split())
        start = perf_counter()
        os.kill(daemon, signal.SIGKILL)
        pool.reconnect()
        pool.load(0)
        first_hit_s = perf_counter() - start
        return Restart(blocks, first_hit_s, pool.hits() / blocks)


@contextmanager
def _supervised(prompts: int, directory: Path) -> Iterator[int]:
    """The pid of a supervisor whose daemon is ready."""
    slabs = -(-prompts * _PROMPT_BLOCKS // (_SLAB_BYTES // (BLOCK_BYTES + 128) - 64)) + 1
    config = f"[host]\nsize_bytes = {slabs * _SLAB_BYTES}\nslab_bytes = {_SLAB_BYTES}\n[offload]\n"
    with daemon_process(config, directory, command="supervise") as supervisor:
        yield supervisor.pid


class FullPool(AbstractContextManager["FullPool"]):
    """An engine in attached mode with the tensors for one prompt at a time.

    Args:
        run_dir: the daemon's.
        prompts: how many prompts it stores.
    """

    def __init__(self, run_dir: Path, prompts: int) -> None:
        self._run_dir = run_dir
        self._instance = new_instance()
        self._requests = 0
        chooser = random.Random("restart")
        self._keys = [chooser.randbytes(_PROMPT_BLOCKS * KEY_SIZE_BYTES) for _ in range(prompts)]
        self._memory = mmap.mmap(-1, _PROMPT_BLOCKS * BLOCK_BYTES)
        self._content = np.frombuffer(self._memory, np.uint8)
        tensor = LayerTensor(self._content.ctypes.data, (_PROMPT_BLOCKS, BLOCK_BYTES))
        self._pages = EnginePages.of_tensors({"layer": tensor})
        self._connect()

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def fill(self) -> None:
        """Store every prompt."""
        for prompt in range(len(self._keys)):
            self._content[:] = self._bytes_of(prompt)
            hold = self._acquire(prompt)
            plan = self._client.prepare_store(hold, 0, self._keys[prompt])
            assert len(plan.slots) == _PROMPT_BLOCKS
            self._shard.store(plan.job(self._keys[prompt], range(_PROMPT_BLOCKS)))
            self._client.release(hold)

    def load(self, prompt: int) -> None:
        """Read a prompt, all of it.

        Raises:
            AssertionError: a block is missing, or other bytes than were stored.
        """
        self._content[:] = 0
        hold = self._acquire(prompt)
        plan = self._client.prepare_load(hold, 0, _PROMPT_BLOCKS)
        bad = self._shard.load(plan.job(self._keys[prompt], range(_PROMPT_BLOCKS)))
        self._client.release(hold)
        assert not bad
        assert np.array_equal(self._content, self._bytes_of(prompt))

    def acquire(self, blocks: int) -> None:
        """Acquire and release the first blocks of the first prompt, without a copy.

        Raises:
            AssertionError: one of them is missing.
        """
        hold = self._client.acquire(
            self._next_request(), self._keys[0][: blocks * KEY_SIZE_BYTES], blocks * _BLOCK_SIZE, full=True
        )
        assert hold.hit == blocks
        self._client.release(hold.lease)

    def hits(self) -> int:
        """How many blocks of all prompts a match finds."""
        return sum(self._client.match(keys, _PROMPT_BLOCKS * _BLOCK_SIZE, full=True) for keys in self._keys)

    def reconnect(self) -> None:
        """Connect anew as soon as there is a daemon.

        Raises:
            RuntimeError: there is none for a long time.
        """
        self._session.close()
        start = perf_counter()
        while True:
            try:
                self._connect()
            except TransportError as error:
                if perf_counter() - start > _PATIENCE_S:
                    raise RuntimeError("the daemon did not come back") from error
                sleep(_PAUSE_S)
            else:
                return

    def _connect(self) -> None:
        with ExitStack() as stack:
            self._client = stack.enter_context(
                OffloadClient.connect(
                    self._run_dir,
                    engine="benchmark",
                    instance=self._instance,
                    keyspace=bytes(32),
                    label="benchmark",
                    layout=OffloadLayout(_BLOCK_SIZE, 1, self._pages.block_bytes, self._pages.fingerprint),
                    deadline_ms=_DEADLINE_MS,
                )
            )
            shard = OffloadShard.join(self._client.session, 0, self._pages, deadline_ms=_DEADLINE_MS)
            self._shard = stack.enter_context(shard)
            self._session = stack.pop_all()

    def _acquire(self, prompt: int) -> LeaseId:
        tokens = _PROMPT_BLOCKS * _BLOCK_SIZE
        return self._client.acquire(self._next_request(), self._keys[prompt], tokens, full=True).lease

    def _next_request(self) -> str:
        self._requests += 1
        return f"request {self._requests}"

    def _bytes_of(self, prompt: int) -> npt.NDArray[np.uint8]:
        """The content of a prompt's blocks."""
        keys = np.frombuffer(self._keys[prompt], np.uint8).reshape(_PROMPT_BLOCKS, KEY_SIZE_BYTES)
        return np.tile(keys, BLOCK_BYTES // KEY_SIZE_BYTES).reshape(-1)
