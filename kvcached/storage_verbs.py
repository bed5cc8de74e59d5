"""The requests about storage, and its process as the service sees it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from kvcached.answers import Answer, Respond
from kvcached.attached_admission import AttachedAdmission
from kvcached.awaiting import Later, Timer
from kvcached.core import storage_requests
from kvcached.core.cache import Cache
from kvcached.core.effects import (
    Effect,
    ForgetStored,
    PrefetchOver,
    QueryStorage,
    SessionEnded,
    SessionExpired,
    StartBackup,
    StartFetch,
)
from kvcached.core.storage_state import Prefetch, PrefetchState
from kvcached.membership import Membership
from kvcached.replica import Replica
from kvcached.storage.link import LinkState
from kvcached.storage.messages import Kind, Over
from kvcached_client import protocol as wire
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.host_header import NAMESPACE_BYTES
from kvcached_client.types import SessionId

#: Requests that wait for prefetches, of all engines. Beyond that they are answered at once.
WAITING_MAX: Final = 4096
STOP_DEADLINE_S: Final = 5.0

_log: Final = logging.getLogger(__name__)


class Link(Protocol):
    """What the service needs of the storage process."""

    state: LinkState
    why: str
    usage: tuple[int, int, int]
    restarts: int
    forgets_due: int

    @property
    def counters(self) -> Mapping[str, int]:
        """What it did."""

    def carry_out(self, effect: QueryStorage | StartFetch | StartBackup) -> None:
        """Order what the core asks for."""

    def forget_all(self, tell: Callable[[Over], None]) -> bool:
        """Have all blocks forgotten; False where nobody is there to be told."""

    def forget_kind(self, kind: Kind, tell: Callable[[Over], None]) -> None:
        """Have the blocks of a kind forgotten, when storage works, and again until it has."""

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
    """

    link: Link
    backend: str
    backup: str
    timeout_ms: int
    timeout_us_per_token: int


@dataclass(slots=True, eq=False)
class _Waiter:
    session: SessionId
    request: wire.Prefetch
    respond: Respond
    timer: Timer | None = None


class StorageVerbs:
    """Serves `prefetch` and `storage_control`, and hands on what the core asks of storage."""

    def __init__(
        self,
        cache: Cache,
        membership: Membership,
        replicas: Mapping[str, Replica],
        attached: AttachedAdmission,
        later: Later,
    ) -> None:
        self.storage: StorageService | None = None
        self._cache = cache
        self._membership = membership
        self._replicas = replicas
        self._attached = attached
        self._later = later
        self._waiters: dict[int, list[_Waiter]] = {}
        self._prefetches: dict[int, Prefetch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.late_by_type: dict[type[wire.Header], Callable[..., Answer | None]] = {
            wire.StorageControl: self._control,
        }

    # --- what the core asks for -------------------------------------------------------------------------------------

    def takes(self, effect: Effect) -> bool:
        """Carry an effect out, if it is about storage."""
        if isinstance(effect, SessionEnded | SessionExpired):
            self._leave(effect.session)
            return False  # others want to know of it, too
        if isinstance(effect, PrefetchOver):
            self._over(effect.prefetch)
        elif isinstance(effect, ForgetStored):
            self._forget(effect)
        elif isinstance(effect, QueryStorage | StartFetch | StartBackup):
            if self.storage is not None:
                self.storage.link.carry_out(effect)
        else:
            return False
        return True

    def _over(self, number: int) -> None:
        """A prefetch is over: answer whoever waits for it."""
        prefetch = self._prefetches.pop(number, None)
        for waiter in self._waiters.pop(number, []):
            if waiter.timer is not None:
                waiter.timer.cancel()
            if prefetch is not None:
                waiter.respond(_answer(waiter.request, prefetch))

    def kind_of(self, namespace: bytes, generation: int) -> Kind | None:
        """Whose blocks a namespace's are; None where nobody has it any more."""
        for replica in self._replicas.values():
            if replica.namespace == namespace and replica.host_geometry is not None:
                return Kind(
                    namespace=namespace[:NAMESPACE_BYTES],
                    header_namespace=replica.header_namespace,
                    header_generation=replica.generation,
                    fingerprint=bytes.fromhex(replica.layout.fingerprint()),
                    generation=0,
                    geometry=replica.host_geometry,
                )
        shape = self._attached.shapes.get(namespace)
        if shape is None or namespace not in self._cache.attached.spaces.by_root:
            return None
        return Kind(
            namespace=namespace[:NAMESPACE_BYTES],
            header_namespace=namespace[:NAMESPACE_BYTES],
            header_generation=generation,
            fingerprint=shape.fingerprint,
            generation=generation,
            geometry=self._attached.geometry(namespace),
        )

    def health(self) -> list[wire.HealthPart]:
        """Whether storage works, if there is any and nobody has taken it off."""
        link = None if self.storage is None else self.storage.link
        if link is None or link.state is LinkState.DETACHED:
            return []
        is_ready = link.state is LinkState.READY
        detail = "" if is_ready else f"{link.state}: {link.why or 'it starts'}; hits from memory go on"
        return [wire.HealthPart(part="storage", ok=is_ready, detail=detail)]

    def close(self) -> None:
        """Answer everybody who waits."""
        for number in list(self._prefetches):
            self._over(number)

    # --- requests ---------------------------------------------------------------------------------------------------

    def prefetch(self, peer: bytes, request: wire.Prefetch, keys: bytes, respond: Respond) -> Answer | None:
        """Begin a prefetch; the answer where it is over, or nobody wants to wait.

        Raises:
            RequestError: no session, or keys and tokens contradict each other.
        """
        group = self._membership.of_connection(peer)
        if group is None:
            raise request_error(
                ErrorCode.NO_SESSION, "this connection has no session", "close the client and connect again"
            )
        found = storage_requests.prefetch(
            self._cache, group.session, request.epoch, keys, request.tokens, request.prefill_tokens_per_s,
            full=request.full,
        )  # fmt: skip
        wait_ms = self._patience_ms(request)
        if found.state is PrefetchState.OVER or not wait_ms or sum(map(len, self._waiters.values())) >= WAITING_MAX:
            return _answer(request, found)
        waiter = _Waiter(group.session, request, respond)
        self._prefetches[found.id] = found
        self._waiters.setdefault(found.id, []).append(waiter)
        waiter.timer = self._later(wait_ms / 1000, partial(self._give_up, found, waiter))
        return None

    def _forget(self, effect: ForgetStored) -> None:
        kind = self.kind_of(effect.namespace, effect.generation)
        if self.storage is not None and kind is not None:
            self.storage.link.forget_kind(kind, partial(_note_forgotten, effect.namespace))

    def _patience_ms(self, request: wire.Prefetch) -> int:
        if request.stop == "best_effort" or self.storage is None:
            return 0
        if request.stop == "wait_complete":
            return request.deadline_ms
        grown_ms = request.tokens * self.storage.timeout_us_per_token // 1000
        return min(self.storage.timeout_ms + grown_ms, request.deadline_ms)

    def _give_up(self, prefetch: Prefetch, waiter: _Waiter) -> None:
        """Somebody has waited for long enough. When nobody waits any more, no more is begun."""
        waiters = self._waiters.get(prefetch.id, [])
        if waiter not in waiters:
            return
        waiters.remove(waiter)
        waiter.respond(_answer(waiter.request, prefetch))
        if not waiters:
            self._waiters.pop(prefetch.id, None)
            self._prefetches.pop(prefetch.id, None)
            storage_requests.stop(self._cache, prefetch)

    def _leave(self, session: SessionId) -> None:
        """A session is over: its engine waits no more."""
        for number, waiters in list(self._waiters.items()):
            for waiter in [each for each in waiters if each.session == session]:
                if waiter.timer is not None:
                    waiter.timer.cancel()
                self._give_up(self._prefetches[number], waiter)

    def _control(self, _: bytes, request: wire.StorageControl, respond: Respond) -> Answer | None:
        storage = self.storage
        if storage is None:
            if request.action == "status":
                return Answer(_report(request.id, None))
            raise request_error(ErrorCode.BAD_VALUE, "no storage is configured", "add [storage] and start again")
        link = storage.link
        if request.action == "attach":
            link.attach()
        elif request.action == "detach":
            task = asyncio.get_running_loop().create_task(link.detach(STOP_DEADLINE_S))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _: respond(Answer(_report(request.id, storage))))
            return None
        elif request.action == "clear":
            if link.forget_all(lambda over: respond(Answer(_cleared(request.id, storage, over)))):
                return None
            raise request_error(ErrorCode.BAD_VALUE, f"storage is {link.state}", "attach it first")
        return Answer(_report(request.id, storage))


def _cleared(number: int, storage: StorageService, over: Over) -> wire.StorageReport | wire.ErrorReply:
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
    blocks, size_bytes, capacity_bytes = storage.link.usage
    return wire.StorageReport(
        id=number,
        backend=storage.backend,
        state=storage.link.state,
        why=storage.link.why,
        backup=storage.backup,
        restarts=storage.link.restarts,
        blocks=blocks,
        size_bytes=size_bytes,
        capacity_bytes=capacity_bytes,
        counters={**storage.link.counters, "forgets_due": storage.link.forgets_due},
    )


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


def _note_forgotten(namespace: bytes, over: Over) -> None:
    _log.info("storage forgot %d blocks of namespace %s", over.count, namespace[:4].hex())
