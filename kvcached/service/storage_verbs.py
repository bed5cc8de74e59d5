"""The requests about storage, and its process as the service sees it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from kvcached.core.cache import Cache
from kvcached.core.messages import (
    ForgetStored,
    QueryStorage,
    StartBackup,
    StartFetch,
)
from kvcached.core.slots.states import PrefetchState
from kvcached.core.transfers.storage_state import Prefetch
from kvcached.events.token_book import TokenBook
from kvcached.monitoring.timing import CopyTimes
from kvcached.service.offload.admission import OffloadAdmission
from kvcached.service.pending import WAITING_MAX, Answer, LateVerb, PendingReplies, PendingReply, Respond, Wait
from kvcached.service.replica import Replica
from kvcached.service.sessions import EngineGroups
from kvcached.storage.backend import Usage
from kvcached.storage.forgets import delete_blocks
from kvcached.storage.link_state import LinkState
from kvcached.storage.messages import AskedRequest, BlockFormat, Done
from kvcached_client.blocks.header import NAMESPACE_BYTES
from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.protocol import engine as wire

STOP_DEADLINE_S: Final = 5.0
#: How long a request waits for a store of another session where its engine has not said how fast it computes. A store
#: takes milliseconds; one that takes longer than this is of an engine that hangs.
STORE_PATIENCE_MS: Final = 1000
#: What people are told of storage that is ready, but has taken none of the last blocks.
READ_ONLY: Final = "read_only"
#: A record that several machines share is late when it was last seen so long ago: it is looked at every few seconds.
RECORD_LATE_MS: Final = 30_000

_log: Final = logging.getLogger(__name__)


class Link(Protocol):
    """What the service needs of the storage process."""

    state: LinkState
    why: str
    trouble: str
    usage: Usage
    restarts: int

    @property
    def write_refusal(self) -> str:
        """Why it accepts no blocks although it works; empty if it has accepted the last ones."""

    @property
    def counters(self) -> Mapping[str, int]:
        """What it did."""

    @property
    def due(self) -> Mapping[bytes, None]:
        """How the keys begin that are to be forgotten, and are not yet."""

    def carry_out(self, effect: QueryStorage | StartFetch | StartBackup) -> None:
        """Request what the core asks for."""

    def forget_all(self, tell: Callable[[Done], None]) -> bool:
        """Have all blocks forgotten; False where nobody is there to be told."""

    def forget(self, prefix: bytes, tell: Callable[[Done], None]) -> None:
        """Have all blocks forgotten whose keys begin so, when storage works, and again until it has."""

    def ask(self, request: Callable[[int], AskedRequest], tell: Callable[[Done], None]) -> bool:
        """Send a request that the core has no part in; False if there is no process. `tell` is called at its end."""

    def attach(self) -> None:
        """Start it, unless it runs."""

    async def detach(self, deadline_s: float) -> None:
        """End it."""


@dataclass(frozen=True, slots=True)
class StorageService:
    """Storage as it is configured.

    Attributes:
        link: the process.
        backend: its name.
        backup: which blocks are written.
        timeout_ms, timeout_us_per_token: how long a prefetch with a timeout is waited for.
        record_age_ms: how long ago the record of generations was seen that several machines share; -1 = there is none.
        begin_anew: replaces a record that cannot be followed, with all blocks; returns whether it did, and storage
            works then. None if that is not what keeps storage from working.
    """

    link: Link
    backend: str
    backup: str
    timeout_ms: int
    timeout_us_per_token: int
    record_age_ms: Callable[[], int] = lambda: -1
    begin_anew: Callable[[], Coroutine[None, None, bool] | None] = lambda: None


class StorageVerbs:
    """Serves `prefetch` and `storage_control`, and hands on what the core asks of storage."""

    def __init__(
        self,
        cache: Cache,
        groups: EngineGroups,
        replicas: Mapping[str, Replica],
        admission: OffloadAdmission,
        pending: PendingReplies,
        copy_times: CopyTimes,
        book: TokenBook | None,
    ) -> None:
        self.storage: StorageService | None = None
        self._copy_times = copy_times
        self._book = book
        self._cache = cache
        self._groups = groups
        self._replicas = replicas
        self._offload_admission = admission
        self._pending = pending
        self._tasks: set[asyncio.Task[object]] = set()
        self.late_by_type: dict[type[wire.Header], LateVerb] = {
            wire.Prefetch: self._prefetch,
            wire.StorageControl: self._control,
        }

    # --- what the core asks for -------------------------------------------------------------------------------------

    def carry_out(self, effect: QueryStorage | StartFetch | StartBackup | ForgetStored) -> None:
        """Order what the core asks of storage, if there is any."""
        if self.storage is None:
            return
        found = None if isinstance(effect, QueryStorage) else self.format_of(effect.namespace, effect.generation)
        if isinstance(effect, StartFetch | StartBackup) and found is not None:
            self._copy_times.ordered(effect, found.geometry.block_bytes * found.geometry.parts)
        if not isinstance(effect, ForgetStored):
            self.storage.link.carry_out(effect)
        elif found is not None:
            self.storage.link.forget(found.stored().prefix(), note_forgotten)

    def delete(self, namespace: bytes, generation: int, keys: bytes, tell: Callable[[int, str], None]) -> None:
        """Have storage delete blocks of a namespace, if there is storage.

        Args:
            namespace: the root of the keys.
            generation: of it; 0 for one of replicas.
            keys: of the blocks.
            tell: told how many there were, and why storage may have some of them still; empty if it has none.
        """
        if self.storage is None:
            tell(0, "")
            return
        link, found = self.storage.link, self.format_of(namespace, generation)
        if found is None:
            tell(0, "how its blocks lie there is not known: no engine has declared it")
        elif link.state is not LinkState.READY:
            tell(0, f"it is {link.state}" + (f": {link.why}" if link.why else ""))
        else:
            delete_blocks(link.ask, found.stored().prefix(), keys, lambda over: tell(max(over.count, 0), _kept(over)))

    def format_of(self, namespace: bytes, generation: int) -> BlockFormat | None:
        """Whose blocks a namespace's are; None where nobody has it any more."""
        for replica in self._replicas.values():
            if replica.namespace == namespace and replica.host_geometry is not None:
                return BlockFormat(
                    namespace=namespace[:NAMESPACE_BYTES],
                    header_namespace=replica.header_namespace,
                    header_generation=replica.generation,
                    fingerprint=bytes.fromhex(replica.layout.block_fingerprint()),
                    generation=0,
                    geometry=replica.host_geometry,
                )
        shape, known = (
            self._offload_admission.shapes.get(namespace),
            self._cache.offload.namespaces.by_root.get(namespace),
        )
        if shape is None or known is None:
            return None
        return BlockFormat(
            namespace=known.spec.storage_root[:NAMESPACE_BYTES],
            header_namespace=namespace[:NAMESPACE_BYTES],
            header_generation=generation,
            fingerprint=shape.fingerprint,
            generation=generation,
            geometry=self._offload_admission.geometry(namespace),
            canonical=shape.canonical if known.spec.canonical_root else None,
        )

    def health(self) -> list[wire.HealthPart]:
        """Whether storage works, if there is any and nobody has taken it off."""
        if self.storage is None or (link := self.storage.link).state is LinkState.DETACHED:
            return []
        troubles = []
        if link.state is not LinkState.READY:
            troubles.append(f"{link.state}: {link.why or 'it starts'}; hits from memory go on")
        elif link.write_refusal:
            troubles.append(f"it takes no blocks: {link.write_refusal}; hits go on")
        elif link.trouble:
            troubles.append(f"it works, but {link.trouble}")
        if (age_ms := self.storage.record_age_ms()) > RECORD_LATE_MS:
            troubles.append(f"what other machines have cleared for {age_ms // 1000} s is not cleared here")
        return [wire.HealthPart(part="storage", ok=not troubles, detail="; ".join(troubles))]

    # --- requests ---------------------------------------------------------------------------------------------------

    def _prefetch(self, peer: bytes, request: wire.Prefetch, frames: list[bytes], respond: Respond) -> Answer | None:
        """Begin a prefetch; the answer where it is over, nobody wants to wait, or too many wait already."""
        session = self._groups.owner(peer).session
        announced = self._cache.announced_to(session)
        if self._book is not None and len(frames) > 1:
            self._book.check(announced, *frames)
        found = self._cache.prefetch(
            session, request.epoch, frames[0], request.tokens, request.prefill_tokens_per_s,
            full=request.full, tenant=request.tenant,
        )  # fmt: skip
        if self._book is not None and len(frames) > 1:
            self._book.note(announced, *frames)
        patience_ms = self._patience_ms(request, found)
        if not patience_ms or self._pending.count(Wait.PREFETCH) >= WAITING_MAX[Wait.PREFETCH]:
            return _answer(request, found)

        def ask(*, is_last: bool) -> Answer | None:
            is_over = found.state is PrefetchState.OVER
            if not is_over and not is_last:
                return None
            answer = _answer(request, found)
            if not is_over and self._pending.count(Wait.PREFETCH, subject=found.id) == 1:  # nobody else waits
                self._cache.storage.prefetches.stop(found)
            return answer

        reply = PendingReply(Wait.PREFETCH, request, respond, ask, session, found.id)
        return self._pending.wait(reply, patience_ms)

    def _patience_ms(self, request: wire.Prefetch, prefetch: Prefetch) -> int:
        """How long a request waits: for a store of another session, and for storage."""
        if request.stop == "best_effort":
            return 0
        if request.stop == "wait_complete":
            return request.deadline_ms
        patience_ms = 0
        if prefetch.state is PrefetchState.WAITING:
            patience_ms += _store_patience_ms(request, prefetch)
        if self.storage is not None:
            patience_ms += self.storage.timeout_ms + request.tokens * self.storage.timeout_us_per_token // 1000
        return min(patience_ms, request.deadline_ms)

    def _control(self, _: bytes, request: wire.StorageControl, __: list[bytes], respond: Respond) -> Answer | None:
        storage = self.storage
        if storage is None:
            if request.action == "status":
                return Answer(_report(request.id, None))
            raise request_error(ErrorCode.BAD_VALUE, "no storage is configured", "add [storage] and start again")
        link = storage.link
        if request.action == "attach":
            link.attach()
        elif request.action == "detach":
            reply = self._waiting(request, respond)
            self._run(
                link.detach(STOP_DEADLINE_S), lambda: self._pending.done(reply, Answer(_report(request.id, storage)))
            )
            return None
        elif request.action == "clear":
            self._clear(storage, request, self._waiting(request, respond))
            return None
        return Answer(_report(request.id, storage))

    def _clear(self, storage: StorageService, request: wire.StorageControl, reply: PendingReply) -> None:
        """Have everything deleted; what cannot be used because of its record is replaced."""
        link, is_replaced = storage.link, False

        def forget() -> bool:
            return link.forget_all(lambda over: self._pending.done(reply, Answer(_cleared(request.id, storage, over))))

        if forget():
            return
        if (work := storage.begin_anew()) is None:
            self._pending.fail(reply, _not_cleared(link))
            return

        async def replace() -> None:
            nonlocal is_replaced
            is_replaced = await work

        def end() -> None:
            if is_replaced:
                self._pending.done(reply, Answer(_report(request.id, storage)))
            elif not forget():  # it may work by itself meanwhile, with all its blocks
                self._pending.fail(reply, _not_cleared(link))

        self._run(replace(), end)

    def _waiting(self, request: wire.StorageControl, respond: Respond) -> PendingReply:
        reply = PendingReply(Wait.STORAGE, request, respond)
        self._pending.wait(reply)
        return reply

    def _run(self, work: Coroutine[None, None, object], end: Callable[[], None]) -> None:
        """Run something, and call `end` afterwards, whatever came of it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: end())


def _kept(over: Done) -> str:
    """Why storage may have blocks still that it was to delete."""
    if over.failed:
        return f"it failed: {over.error}"
    if over.error:
        return over.error
    return "it deletes no blocks, and drops them when it wants" if over.count < 0 else ""


def _not_cleared(link: Link) -> RequestError:
    fix = "attach it first" if link.state is LinkState.DETACHED else "clear it when it works"
    return request_error(ErrorCode.BAD_VALUE, f"storage is {link.state}" + (f": {link.why}" if link.why else ""), fix)


def _cleared(number: int, storage: StorageService, over: Done) -> wire.StorageReport | wire.ErrorReply:
    if not over.failed:
        return _report(number, storage)
    error = request_error(ErrorCode.INTERNAL, f"storage did not forget everything: {over.error}", "clear it again")
    return wire.error_reply(number, error)


def _report(number: int, storage: StorageService | None) -> wire.StorageReport:
    if storage is None:
        return wire.StorageReport(
            id=number, backend="", state=LinkState.DETACHED, why="", backup="never", restarts=0,
            blocks=-1, size_bytes=-1, capacity_bytes=-1, counters={},
        )  # fmt: skip
    usage, disk = storage.link.usage, storage.link.usage.local_disk
    is_read_only = storage.link.state is LinkState.READY and bool(storage.link.write_refusal)
    return wire.StorageReport(
        id=number,
        backend=storage.backend,
        state=READ_ONLY if is_read_only else storage.link.state,
        why=storage.link.write_refusal if is_read_only else storage.link.trouble or storage.link.why,
        backup=storage.backup,
        restarts=storage.link.restarts,
        blocks=usage.blocks,
        size_bytes=usage.size_bytes,
        capacity_bytes=usage.capacity_bytes,
        counters={**storage.link.counters, "forgets_due": len(storage.link.due)},
        record_age_ms=storage.record_age_ms(),
        local_disk=wire.LocalDisk(**disk._asdict()) if disk else None,
    )


def _store_patience_ms(request: wire.Prefetch, prefetch: Prefetch) -> int:
    """No longer than the engine computes the same blocks: so a wait in vain at most doubles the time until they are."""
    if not request.prefill_tokens_per_s:
        return STORE_PATIENCE_MS
    tokens = prefetch.filling * prefetch.chain.block_tokens
    return math.ceil(min(tokens / request.prefill_tokens_per_s * 1000, request.deadline_ms))


def _answer(request: wire.Prefetch, prefetch: Prefetch) -> Answer:
    is_over = prefetch.state is PrefetchState.OVER
    return Answer(
        wire.Prefetched(
            id=request.id,
            blocks=prefetch.inserted,
            fetched=prefetch.fetched,
            is_over=is_over,
            reason=str(prefetch.end) if is_over else "waiting",
        )
    )


def note_forgotten(over: Done) -> None:
    """A generation that is over is out of storage."""
    _log.info("storage forgot %d blocks of a generation that is over", over.count)
