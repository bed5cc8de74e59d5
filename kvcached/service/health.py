"""The health check. It acts as an engine does: acquire, write and copy on every worker, commit, match, release.

The reply has to wait for the workers, so each health request is served in a task of its own.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from array import array
from collections.abc import Callable, Iterable, Mapping

from kvcached.core.cache import Cache
from kvcached.core.insight.invariants import check_counts
from kvcached.core.managed_session import ManagedSession
from kvcached.core.slots.states import NO_MEMORY, PoolState
from kvcached.process.notify import unsent
from kvcached.process.seqpacket import SocketFile
from kvcached.service.admission import DrainState
from kvcached.service.pending import Answer, PendingReplies, PendingReply, Respond, Wait
from kvcached.service.refusals import REFUSED, in_words, internal_error
from kvcached.service.replica import Replica
from kvcached.service.state_writer import Headers
from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.errors import NoCapacity
from kvcached_client.protocol.engine import Health, HealthPart, HealthReport, HostRegistration
from kvcached_client.types import KEY_SIZE_BYTES, NO_FENCE, unpack_ranges

#: One slot to write to, and one to copy it to.
_BLOCKS = 2
#: How long a check waits for the workers: it must reply before its caller gives up. A worker counts as hung much later.
PATIENCE_S = 3.0
#: How much a check writes to the host pool: some pages, in less than a tenth of a millisecond.
CHECKED_BYTES = 64 << 10
#: What is done about workers that could not be started, and what else serves.
_TRIED_AGAIN = "They are started again every few seconds; until then nothing is copied to or from this device pool"
_STEPS = ("acquire", "workers", "commit", "match", "release")

log = logging.getLogger(__name__)


class HealthRequests:
    """Serves the verb `health`.

    Args:
        settle: carries out the effects that the checks have caused in the core.
        drain_state: whether the daemon takes new work; the report says so.
        more: further parts of the report.

    Attributes:
        sockets: the files by which engines, routers and people reach the daemon.
        closed: why a door that the configuration names is closed, by the part of the report that says so.
        before_probe: records what the core has changed, before workers write to slots that it has granted.
    """

    def __init__(
        self,
        cache: Cache,
        replicas: Mapping[str, Replica],
        pending: PendingReplies,
        now_ms: Callable[[], int],
        *,
        settle: Callable[[], None],
        drain_state: DrainState,
        more: Callable[[], list[HealthPart]] = list,
        before_probe: Callable[[], None] = lambda: None,
    ) -> None:
        self._cache = cache
        self._replicas = replicas
        self._now_ms = now_ms
        self._settle = settle
        self._pending = pending
        self._drain_state = drain_state
        self._more = more
        self.sockets: list[SocketFile] = []
        self.closed: dict[str, str] = {}
        self._checks = HealthChecks(cache, before_probe)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, _: bytes, request: Health, __: list[bytes], respond: Respond) -> None:
        """Start a check; the reply follows when it ends.

        Raises:
            RequestError: too many health requests are under way.
        """
        reply = PendingReply(Wait.HEALTH, request, respond)
        self._pending.wait(reply)
        task = asyncio.get_running_loop().create_task(self._answer(reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def doubts(self, replicas: Iterable[Replica], patience_s: float) -> list[str]:
        """Which of these replicas' device pools are not known to be well, and why. Pools without memory are left out.

        A pool that a check would skip, as one whose slots are all leased, is in doubt, too.
        """
        asked = (each for each in replicas if self._cache.pools[each.name].state not in NO_MEMORY)
        checks = (self._checks.check(each, self._now_ms(), patience_s) for each in asked)
        checked = await asyncio.gather(*checks)
        self._settle()
        return [f"{parts[-1].part}: {parts[-1].detail}" for parts in checked if not _is_proven(parts)]

    def close(self) -> None:
        """Cancel all checks, because the daemon stops."""
        for task in self._tasks:
            task.cancel()

    async def _answer(self, reply: PendingReply) -> None:
        try:
            checks = (self._checks.check(each, self._now_ms(), PATIENCE_S) for each in self._replicas.values())
            parts = [part for checked in await asyncio.gather(*checks) for part in checked]
            self._settle()
            violations = check_counts(self._cache)
            parts.append(HealthPart(part="counts", ok=not violations, detail="; ".join(violations[:3])))
            parts += self._degraded()
            parts += self._registered()
            parts += self._more()
            parts += self._unreachable()
            parts += _untold()
            parts += self._held_back()
            is_ok = all(part.ok for part in parts)
            report = HealthReport(id=reply.request.id, ok=is_ok, parts=tuple(parts))
            self._pending.done(reply, Answer(report))
        except Exception:
            log.exception("internal error during a health check")
            self._pending.fail(reply, internal_error())

    def _unreachable(self) -> list[HealthPart]:
        """Doors that are closed, and socket files that somebody has removed.

        Whoever is connected is served, and nobody else finds the daemon.
        """
        closed = [HealthPart(part=door, ok=False, detail=why) for door, why in self.closed.items()]
        lost = [file.path for file in self.sockets if not file.is_there]
        detail = f"no file any more: {', '.join(lost)}; restart the daemon, and keep cleaners away from the directory"
        return [*closed, *([HealthPart(part="sockets", ok=False, detail=detail)] if lost else [])]

    def _degraded(self) -> list[HealthPart]:
        """A failed part for each replica whose workers die again and again, even if they run at the moment."""
        words = "degraded: its workers have died again and again; see the daemon's log"
        return [
            _part(replica, "restarts", f"{words}. The last loss: {replica.last_loss}", ok=False)
            for replica in self._replicas.values()
            if replica.workers.is_degraded and self._cache.pools[replica.name].state is PoolState.AWAKE
        ]

    def _registered(self) -> list[HealthPart]:
        """How much of the host pool devices reach directly. Copies of the rest are slower, and that is no illness."""
        return [
            _part(replica, "registered", "; ".join(map(_registration, registered)))
            for replica in self._replicas.values()
            if (registered := replica.workers.registered)
        ]

    def _held_back(self) -> list[HealthPart]:
        """What an administrator has paused or drained. It is reported and is not a failure."""
        what = [] if self._drain_state.takes_work else [str(self._drain_state.state)]
        paused = [name for name, pool in self._cache.pools.items() if pool.paused]
        paused += ["engines in offload mode"] if self._cache.offload.paused else []
        what += [f"paused: {', '.join(paused)}"] if paused else []
        what += [
            f"{name}: {pool.state}" for name, pool in self._cache.pools.items() if pool.state is not PoolState.AWAKE
        ]
        return [HealthPart(part="mode", ok=True, detail="; ".join(what))] if what else []


class HealthChecks:
    """Checks the replicas of one cache."""

    def __init__(self, cache: Cache, before_probe: Callable[[], None] = lambda: None) -> None:
        self._cache = cache
        self._before_probe = before_probe
        self._number = 0
        self._unanswered: set[str] = set()  #: replicas with a probe under way whose check has timed out

    async def check(self, replica: Replica, now_ms: int, patience_s: float) -> list[HealthPart]:
        """Check one replica; returns one part per step, up to and including the first step that fails.

        The check opens a session beside the engine's, acquires slots as an engine does, and commits them under random
        keys. It removes all of that at its end. A pool whose slots are all leased is busy, which is no failure.
        Workers that do not answer within `patience_s` fail the check.
        """
        if trouble := replica.trouble:
            return [_part(replica, "workers", f"none runs: {trouble}. {_TRIED_AGAIN}", ok=False)]
        if (state := self._cache.pools[replica.name].state) is not PoolState.AWAKE:
            return [_part(replica, "acquire", f"skipped: the pool is {state}")]
        if self._cache.pools[replica.name].clearing:
            return [_part(replica, "acquire", "skipped: the namespace is being cleared")]
        if replica.name in self._unanswered:
            words = _silence(replica, "the probe of an earlier check is still unanswered")
            return [_part(replica, "workers", words, ok=False)]
        if not self._cache.pools[replica.name].healthy:
            return [_part(replica, "workers", "a worker was lost; workers are being restarted, see the log", ok=False)]
        session = self._cache.open_session(replica.name, now_ms, counted=False)
        cleared = self._cache.clearings.version
        keys = secrets.token_bytes(_BLOCKS * KEY_SIZE_BYTES)
        parts: list[HealthPart] = []
        try:
            await self._exercise(replica, session, keys, parts, patience_s)
        except REFUSED as refusal:
            error = in_words(refusal)
            busy = isinstance(error, NoCapacity) or self._cache.clearings.version != cleared
            busy = busy or self._cache.pools[replica.name].clearing
            step = _STEPS[len(parts)]
            parts.append(_part(replica, step, ("skipped: " if busy else "") + error.message, ok=busy))
        finally:
            if replica.name not in self._unanswered:
                self._leave(replica, session, keys)
        return parts

    async def _exercise(
        self, replica: Replica, session: ManagedSession, keys: bytes, parts: list[HealthPart], patience_s: float
    ) -> None:
        cache, epoch, tokens = self._cache, session.pool.epoch, _BLOCKS * replica.layout.block_size
        self._number += 1
        grant = cache.managed.acquire(session.id, epoch, f"health-{self._number}", keys, tokens, 0, full=False)
        parts.append(_part(replica, "acquire"))
        first, second = (slot for start, count in unpack_ranges(grant.ranges) for slot in range(start, start + count))
        self._before_probe()
        probe = replica.workers.probe(first, second)
        done, _ = await asyncio.wait([probe], timeout=patience_s)
        if not done:
            self._leave_when_answered(replica, session, keys, probe)
            parts.append(_part(replica, "workers", _silence(replica, f"no answer for {patience_s:g} s"), ok=False))
            return
        probe.result()
        parts.append(_part(replica, "workers"))
        cache.managed.commit(session.id, epoch, grant.lease, 0, keys, array("i", grant.ranges), NO_FENCE)
        parts.append(_part(replica, "commit"))
        hit, _ = cache.managed.match(session.id, epoch, keys, tokens, full=True)
        parts.append(_part(replica, "match", "" if hit == _BLOCKS else f"{hit} of {_BLOCKS} blocks", ok=hit == _BLOCKS))
        cache.managed.release(session.id, epoch, grant.lease, NO_FENCE)
        parts.append(_part(replica, "release"))

    def _leave_when_answered(
        self, replica: Replica, session: ManagedSession, keys: bytes, probe: asyncio.Future[None]
    ) -> None:
        """End the check's session once no worker writes to its slots any more."""
        self._unanswered.add(replica.name)

        def answered(probe: asyncio.Future[None]) -> None:
            probe.exception()  # the check has already reported the timeout
            self._unanswered.discard(replica.name)
            self._leave(replica, session, keys)

        probe.add_done_callback(answered)

    def _leave(self, replica: Replica, session: ManagedSession, keys: bytes) -> None:
        self._cache.close_session(session.id)
        self._cache.managed.discard(replica.name, keys)


class HostMemoryCheck:
    """Checks the host pool's memory.

    Args:
        headers: the headers of the host pool's slots; None without a host pool, or if no daemon can take it over.
        replicas: the replicas that may have blocks in the host pool.
        geometry: returns how the blocks of a namespace lie in the host pool.
    """

    def __init__(
        self,
        cache: Cache,
        headers: Headers | None,
        replicas: Mapping[str, Replica],
        geometry: Callable[[bytes], HostGeometry],
    ) -> None:
        self._cache = cache
        self._headers = headers
        self._replicas = replicas
        self._geometry = geometry

    def parts(self) -> list[HealthPart]:
        """Write and read back bytes of the memory that all engines map, without evicting a block.

        The bytes go to an unused slab; if there is none, to the end of a slab, behind its last block. If every byte of
        the host pool is in use, the check is skipped and reports that.
        """
        if self._headers is None:
            return []
        place = self._unused()
        if place is None:
            return [
                HealthPart(part="host/memory", ok=True, detail="skipped: blocks fill the host pool to its last byte")
            ]
        wrong = self._headers.try_end(*place)
        return [HealthPart(part="host/memory", ok=not wrong, detail=wrong)]

    def _unused(self) -> tuple[int, int] | None:
        """A slab, and how many bytes at its end are unused; None if no slab has unused bytes."""
        stock = self._cache.slab_allocator
        if (slab := stock.unused) is not None:
            return slab, CHECKED_BYTES
        known = {each.namespace for each in self._replicas.values() if each.host_geometry is not None}
        known |= self._cache.offload.namespaces.by_root.keys()
        for pool in stock.pools:
            rest = self._geometry(pool.namespace).rest_bytes if pool.slabs and pool.namespace in known else 0
            if rest:
                return next(iter(pool.slabs)), min(CHECKED_BYTES, rest)
        return None


def _silence(replica: Replica, what: str) -> str:
    """That workers say nothing, and which."""
    return f"{what}: {who}" if (who := replica.workers.unprobed()) else what


def _is_proven(parts: list[HealthPart]) -> bool:
    """Whether a check has come to its end, and nothing failed or was skipped."""
    return len(parts) == len(_STEPS) and all(part.ok and not part.detail for part in parts)


def _untold() -> list[HealthPart]:
    """What the service manager has not taken: without it, it keeps no memory, and may not know that the daemon runs."""
    count = unsent()
    detail = (
        f"{count} {'message waits' if count == 1 else 'messages wait'} for the service manager, which takes none: see "
        "whether it hangs or is stopped. Memory that it was not told to keep is lost when the daemon dies"
    )
    return [HealthPart(part="manager", ok=False, detail=detail)] if count else []


def _registration(of: HostRegistration) -> str:
    said = f"shard {of.shard}: {of.registered_bytes} of {of.size_bytes} bytes of the host pool"
    return f"{said}, copies of the rest are slower: {of.error}" if of.error else said


def _part(replica: Replica, step: str, detail: str = "", *, ok: bool = True) -> HealthPart:
    return HealthPart(part=f"{replica.name}/{step}", ok=ok, detail=detail)
