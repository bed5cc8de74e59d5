"""Engines of the matrix. Commands are methods; each returns a line. Blocks hold what follows from their keys."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

from kvcached_client import KvcachedError, Lease
from kvcached_client.blocks import copy
from kvcached_client.errors import NoCapacity
from kvcached_client.transport.misses import Failures
from tests.cuda import offload_engine
from tests.cuda.pool_engine import BLOCKS
from tests.cuda.stream_engine import GatedEngine
from tests.daemon import offload_process
from tests.daemon.offload_process import Scheduler, ShardMemory

#: Longer than anything that a step waits for on a busy machine.
DEADLINE_MS: Final = 15_000
OFFLOAD_BLOCKS: Final = 6
#: Tokens of prompts that hold slots and are never cached.
CROWD_TOKEN: Final = 1 << 28


class MatrixEngine(Protocol):
    """What the runner asks for. Each may raise what `kvcached_client.errors` has."""

    def compute(self, number: int) -> str:
        """Serve a prompt: compute what is not cached, and store it. ``wrong N`` has the wrong blocks of hits so far."""

    def fetch(self, number: int) -> str:
        """Read a prompt's hit while it may be loading; says how many blocks were wrong."""

    def look(self, number: int) -> str:
        """Compare a prompt's hit: ``hit H ready R wrong W``."""

    def settle(self, number: int) -> str:
        """All that was computed is there."""

    def crowd(self, number: int) -> str:
        """Hold every slot and want more: refused as a whole, until another lets go. ``wrong N`` as of `compute`."""

    def rejoin(self, number: int) -> str:
        """Go on with the next daemon."""

    def leave(self, number: int) -> str:
        """End the session."""


class Managed(GatedEngine):
    """An engine on the daemon's device pool. It waits for no kernel before it commits."""

    failures: Failures = "raise"
    deadline_ms = DEADLINE_MS

    def compute(self, number: int) -> str:
        self.step(number)
        self.signal(self.fences.signalled())
        return self._wrong_so_far()

    def settle(self, number: int) -> str:
        self.signal(self.fences.wait())
        return self._wrong_so_far()

    def fetch(self, number: int) -> str:
        try:
            said = super().fetch(number)
            was_read = said.startswith("read ") and " whole True " in said
            return f"wrong {self.wrong if was_read else 0}"
        finally:
            self.wrong = 0  # kernels of a step that is discarded see anything

    def crowd(self, number: int) -> str:
        leases: list[Lease] = []
        try:
            with suppress(NoCapacity):
                while True:
                    leases.append(self._held(number, len(leases)))
            for lease in leases[:2]:  # each of the two wants what the other has
                with suppress(NoCapacity):
                    lease.allocate(2 * BLOCKS * self.pool.layout.block_size)
                    return f"wrong {len(leases)}"  # there was room after all
            wrong = sum(map(self._is_overwritten, range(len(leases)), leases))
            leases.pop().release()
            leases.append(self._held(number, len(leases)))
            return f"wrong {wrong}"
        finally:
            with suppress(KvcachedError):
                for lease in leases:
                    lease.release()

    def _held(self, number: int, index: int) -> Lease:
        """A lease on slots that nobody else has, with its number written into them."""
        self._requests += 1
        tokens = range(first := CROWD_TOKEN + 1000 * number + 10 * index, first + BLOCKS * self.pool.layout.block_size)
        lease = self.client.acquire(f"crowd-{self._requests}", self.client.chain([*tokens, index, number]))
        for part in self.parts:
            part[list(lease.block_table)] = index
        return lease

    def _is_overwritten(self, index: int, lease: Lease) -> bool:
        return any((part[list(lease.block_table)] != index).any() for part in self.parts)

    def rejoin(self, number: int) -> str:
        self.client.rejoin()
        return "rejoined"

    def leave(self, number: int) -> str:
        self.settle(number)
        self.gates.close()
        self.client.close()
        return "left"

    def _wrong_so_far(self) -> str:
        return f"wrong {self.wrong}"


class Offload:
    """An engine with tensors of its own on the device, in offload mode."""

    def __init__(self, run_dir: str) -> None:
        copy.PIECES_MAX = 4  # type: ignore[misc] # so that a copy of a few blocks has a middle
        offload_process.DEADLINE_MS = DEADLINE_MS
        self._engine = offload_engine.Engine(run_dir, 0)

    def compute(self, number: int) -> str:
        self._engine.store(f"p{number}", OFFLOAD_BLOCKS)
        return "wrong 0"

    def look(self, number: int) -> str:
        return told(self._engine.load(f"p{number}", OFFLOAD_BLOCKS))

    fetch = look

    def settle(self, number: int) -> str:
        return "wrong 0"

    crowd = settle

    def rejoin(self, number: int) -> str:
        self._engine.connect()
        return "rejoined"

    def leave(self, number: int) -> str:
        self._engine.leave()
        return "left"


class OffloadOnCpu:
    """An engine of the same namespace whose tensors are on the CPU: it reads what is left when the device is lost."""

    def __init__(self, run_dir: str) -> None:
        page_bytes = offload_engine.PAGE_BYTES
        self._scheduler = Scheduler(run_dir, bytes(15) + b"c", 1, page_bytes, DEADLINE_MS)
        self._memory = ShardMemory(0, page_bytes)
        self._memory.join(self._scheduler.client.session)

    def compute(self, number: int) -> str:
        plan, order = self._scheduler.prepare_store(f"p{number}", OFFLOAD_BLOCKS)
        if plan.transfer:
            self._memory.store(order)
        return "wrong 0"

    def look(self, number: int) -> str:
        if not self._scheduler.hit(f"p{number}", OFFLOAD_BLOCKS):
            return told("0")
        order = self._scheduler.prepare_load(f"p{number}", OFFLOAD_BLOCKS)
        bad, right = self._memory.load(order)
        return told(f"{len(order.slots)} {bad} {right}")

    fetch = look

    def settle(self, number: int) -> str:
        return "wrong 0"

    crowd = rejoin = settle

    def leave(self, number: int) -> str:
        assert self._memory.link is not None
        self._memory.link.close()
        self._scheduler.client.close()
        return "left"


def told(loaded: str) -> str:
    """What an engine in offload mode has loaded, as `MatrixEngine.look` says it; bad blocks count as missed."""
    hit, _, rest = loaded.partition(" ")
    bad = 0 if rest.startswith("[]") or not rest else rest.count(",") + 1
    return f"hit {int(hit) - bad} ready {int(hit) - bad} wrong {int(rest.endswith('False'))}"


ENGINES: Final[dict[str, Callable[[str], MatrixEngine]]] = {
    "managed": Managed,
    "offload": Offload,
    "offload on cpu": OffloadOnCpu,
}
