"""An engine that keeps its own device memory, and copies between that and the host pool."""

from __future__ import annotations

import time
from contextlib import ExitStack
from hashlib import blake2b
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from kvcached_client.blocks.pages import EnginePages
from kvcached_client.errors import DaemonFailure, ErrorCode, NoCapacity, Refused, RequestError, Stale, TransportError
from kvcached_client.offload import OffloadClient, OffloadLayout, PreparedLoad
from kvcached_client.offload_shard import OffloadShard
from kvcached_client.types import KEY_SIZE_BYTES, LeaseId
from tests.chaos.oracle import POISON, Item, compare, page
from tests.chaos.prompts import BLOCK_SIZE, BLOCKS_MAX, some_prompt
from tests.chaos.reporting import Report
from tests.client.offload_rig import HostTensor

if TYPE_CHECKING:
    from tests.chaos.managed import EnginePlan

LAYERS, PAGE_BYTES = 3, 256
_DEADLINE_MS = 1500
_TRY_LATER = {ErrorCode.DRAINING, ErrorCode.CLEARING, ErrorCode.POOL_BUSY, ErrorCode.LIMIT, ErrorCode.DEADLINE}


class OffloadEngine:
    """Scheduler and shards in one process; one request after the other, each in the same blocks of its tensors."""

    def __init__(self, plan: EnginePlan, report: Report) -> None:
        self._plan = plan
        self._report = report
        self._random = Random(plan.seed)
        self._instance = blake2b(plan.name.encode(), digest_size=16).digest()
        self._tensors = [
            [HostTensor(np.zeros((BLOCKS_MAX, PAGE_BYTES), np.uint8)) for _ in range(LAYERS)]
            for _ in range(plan.shards)
        ]
        self._pages = [
            EnginePages.of_tensors({f"layer {number}": each for number, each in enumerate(tensors)})
            for tensors in self._tensors
        ]
        self._number = 0
        self._parts = ExitStack()

    def serve(self) -> None:
        """For ever."""
        while True:
            try:
                with ExitStack() as self._parts:
                    self._connect()
                    while True:
                        self._serve_one()
                        self._report.tell_counts()
            except (TransportError, Stale) as error:
                self._report.note(f"session over: {type(error).__name__} {error}")
            except RequestError as error:
                if error.code not in _TRY_LATER:
                    self._report.tell("refused", what="offload", error=str(error))
            time.sleep(0.05)

    def _connect(self) -> None:
        layout = OffloadLayout(BLOCK_SIZE, self._plan.shards, self._pages[0].block_bytes, self._pages[0].fingerprint)
        self._client = self._parts.enter_context(
            OffloadClient.connect(
                self._plan.run_dir,
                engine="chaos",
                instance=self._instance,
                keyspace=b"c" * 32,
                label="chaos",
                layout=layout,
                deadline_ms=_DEADLINE_MS,
            )
        )
        self._shards = [
            self._parts.enter_context(OffloadShard.join(self._client.session, shard, pages, deadline_ms=_DEADLINE_MS))
            for shard, pages in enumerate(self._pages)
        ]
        self._report.counts["sessions"] += 1
        self._report.note(f"connected session={self._client.session.id} epoch={self._client.epoch}")

    def _serve_one(self) -> None:
        random, prompt = self._random, some_prompt(self._random)
        keys, tokens = prompt.keys, len(prompt.tokens)
        self._number += 1
        name = f"{self._plan.number}-{self._number}"
        if random.random() < 0.3:
            stop = random.choice(["best_effort", "timeout", "timeout"])
            result = self._client.prefetch(keys, tokens, stop=stop, deadline_ms=200, full=True)  # type: ignore[arg-type]
            self._report.counts["blocks fetched"] += result.fetched
        load_from, priority = random.choice([None, 0, 0, 1, 3]), random.choice([0, 0, 0, 1, -1])
        lease, hit, _, load = self._client.acquire(
            name, keys, tokens, full=True, priority=priority, load_from=load_from
        )
        self._report.note(f"{name} lease={lease} hit={hit}")
        self._report.counts["offload hit blocks"] += hit
        released = False
        try:
            good = self._load(name, lease, keys, hit, load) if hit else 0
            if random.random() < 0.1:
                self._client.release(lease)
                released = True
            elif len(keys) // KEY_SIZE_BYTES > hit:
                self._store(name, lease, keys, hit)
            self._report.counts["requests"] += good >= 0
        except NoCapacity:
            self._report.counts["requests without room"] += 1
        except (Refused, DaemonFailure) as error:
            if error.code not in {ErrorCode.HIT_GONE, ErrorCode.PAUSED}:
                raise
            self._report.counts[f"refused: {error.code}"] += 1
        if not released:
            self._client.release(lease)
        if random.random() < 0.002:
            try:
                self._client.clear()
            except DaemonFailure as error:  # cleared, but storage could not be told: it is away
                self._report.note(f"cleared, and: {error}")

    def _load(self, name: str, lease: LeaseId, keys: bytes, hit: int, plan: PreparedLoad | None) -> int:
        random = self._random
        if plan is None:
            start = random.choice([0, 0, random.randrange(hit)])
            plan = self._client.prepare_load(lease, start, hit - start)
        else:
            start = hit - len(plan.slots)
            self._report.counts["loads announced by an acquire"] += 1
        if random.random() < 0.03:
            self._client.cancel_load(plan.transfer)
            return 0
        if random.random() < 0.05:
            time.sleep(random.choice([0.05, 0.3]))
        job = plan.job(keys, range(hit))
        for shard, link in enumerate(self._shards):
            for tensor in self._tensors[shard]:
                tensor.array[:] = POISON
            bad = {start + index for index in link.load(job)}
            self._report.counts["blocks found bad"] += len(bad)
            self._compare(name, keys, [depth for depth in range(start, hit) if depth not in bad], shard, plan.slots)
        return hit

    def _compare(self, name: str, keys: bytes, depths: list[int], shard: int, slots: object) -> None:
        if not depths:
            return
        items = [Item(depth, depth, _key(keys, depth)) for depth in depths]
        for layer, tensor in enumerate(self._tensors[shard]):
            wrong = list(compare(tensor.array[depths].astype(np.uint8), items, layer, shard))
            if wrong:
                self._report.tell("wrong", request=name, hit="offload", shard=shard, slots=slots, pages=wrong[:6])
        self._report.counts["compared offload"] += len(depths)

    def _store(self, name: str, lease: int, keys: bytes, hit: int) -> None:
        random = self._random
        plan = self._client.prepare_store(lease, hit, keys[KEY_SIZE_BYTES * hit :])  # type: ignore[arg-type]
        if not plan.transfer:
            return
        self._report.note(f"{name} store={plan.transfer} pieces={plan.pieces} slots={plan.slots.tolist()}")
        if random.random() < 0.03:
            self._client.cancel_store(plan.transfer, "the engine changed its mind")
            return
        if random.random() < 0.05:
            time.sleep(random.choice([0.05, 0.3]))
        job = plan.job(keys, range(len(keys) // KEY_SIZE_BYTES))
        for shard, link in enumerate(self._shards):
            for layer, tensor in enumerate(self._tensors[shard]):
                tensor.array[:] = POISON
                for depth in job.blocks:
                    tensor.array[depth] = page(_key(keys, depth), layer, shard, PAGE_BYTES)
            link.store(job)
        self._report.counts["blocks stored"] += len(plan.slots)


def _key(keys: bytes, depth: int) -> bytes:
    return keys[KEY_SIZE_BYTES * depth : KEY_SIZE_BYTES * (depth + 1)]
