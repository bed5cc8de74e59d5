"""The seam between sockets and decisions: a typed request in, one reply out.

One method per verb, each a straight line: who asks, what the core says, the reply. Nothing in here waits except
`health`, which asks the workers and answers when they have.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from kvcached.core.cache import Cache
from kvcached.core.effects import SessionEnded, SessionExpired
from kvcached.core.events import Event, MemberLost, MembersDied
from kvcached.core.invariants import check, check_counts
from kvcached.core.session import Session
from kvcached.core.states import SessionState
from kvcached.health import HealthChecks
from kvcached.membership import Group, Membership, Peer
from kvcached.replica import Replica
from kvcached.reports import description, stats_report
from kvcached_client import protocol as wire
from kvcached_client.attach_protocol import Identified, Joined
from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.types import FenceSequence, LeaseId, SessionId, ShardIndex

log = logging.getLogger(__name__)

CAPABILITIES: tuple[str, ...] = ()  #: of version 1; a later optional field comes with a name here
#: Health checks take slots and workers' time; who asks more often waits for the one under way.
HEALTH_CHECKS_PENDING_MAX = 16

#: Requests whose answers are kept, so that a retry has one effect. `Acquire` is idempotent by its own request id, and
#: its answers are large.
_KEPT = (wire.Hello, wire.Allocate, wire.Commit, wire.Release)
#: ZeroMQ makes routing ids of five bytes, the first of them zero, for peers that do not choose one.
_ROUTING_ID_LENGTH = 5


class Answer(NamedTuple):
    """A reply: its header and the frames that follow it."""

    header: wire.Header
    frames: tuple[bytes, ...] = ()


Respond = Callable[[Answer], None]


class PeerWatch(Protocol):
    """Who watches processes for their death."""

    def forget(self, peer: Any) -> None:  # noqa: ANN401 - the same peers that it brought, whatever class they have
        """Stop watching a process that no session needs any more."""


class Service:
    """Requests and events of one daemon."""

    def __init__(
        self,
        cache: Cache,
        replicas: list[Replica],
        *,
        now_ms: Callable[[], int],
        endpoint: str,
        heartbeat_interval_ms: int,
        answers_kept_per_session: int,
    ) -> None:
        self._cache = cache
        self._replicas = {replica.name: replica for replica in replicas}
        self._now_ms = now_ms
        self._started_ms = now_ms()
        self._endpoint = endpoint
        self._heartbeat_interval_ms = heartbeat_interval_ms
        self._answers_kept = answers_kept_per_session
        self._membership = Membership()
        self._answers: dict[SessionId, OrderedDict[tuple[type[wire.Header], int], Answer]] = {}
        self._health_checks = HealthChecks(cache)
        self._health_tasks: set[asyncio.Task[None]] = set()
        self.watch: PeerWatch | None = None
        self._verbs: dict[type[wire.Header], Callable[[bytes, Any, list[bytes]], Answer]] = {
            wire.Hello: self._hello,
            wire.Match: self._match,
            wire.Acquire: self._acquire,
            wire.Allocate: self._allocate,
            wire.Commit: self._commit,
            wire.Release: self._release,
            wire.Heartbeat: self._heartbeat,
            wire.Bye: self._bye,
            wire.Stats: self._stats,
            wire.Check: self._check,
            wire.Describe: self._describe,
        }

    # --- the line from a request to its reply -----------------------------------------------------------------------

    def submit(self, peer: bytes, request: wire.Request, frames: list[bytes], respond: Respond) -> None:
        """Serve one request: exactly one answer goes to `respond`, or none where the request asked for none.

        `peer` is the routing id of the connection it came from; `frames` are as many as the verb takes, of sizes that
        fit it.
        """
        self.count("requests")
        try:
            if isinstance(request, wire.Health):
                self._start_health_check(request, respond)
                return
            answer = self._kept_answer(peer, request) or self._serve(peer, request, frames)
            self.carry_out()
        except RequestError as error:
            answer = Answer(wire.error_reply(request.id, self.refused(error)))
        except Exception:
            log.exception("internal error while serving %s", type(request).__name__)
            answer = Answer(wire.error_reply(request.id, self.refused(_internal_error())))
        if getattr(request, "reply", True):
            respond(answer)

    def refused(self, error: RequestError) -> RequestError:
        """Count an error by its code."""
        self.count(f"errors_{error.code}")
        return error

    def count(self, what: str) -> None:
        """Count something that happened."""
        self._cache.counters[what] += 1

    def _serve(self, peer: bytes, request: wire.Request, frames: list[bytes]) -> Answer:
        if not isinstance(request, _KEPT):
            return self._verbs[type(request)](peer, request, frames)
        try:
            answer = self._verbs[type(request)](peer, request, frames)
        except RequestError as error:
            answer = Answer(wire.error_reply(request.id, self.refused(error)))
        self._keep_answer(peer, request, answer)
        return answer

    def _kept_answer(self, peer: bytes, request: wire.Request) -> Answer | None:
        """The answer that this request already got, so that a retry has one effect and one answer."""
        group = self._membership.of_connection(peer)
        return self._answers[group.session].get((type(request), request.id)) if group is not None else None

    def _keep_answer(self, peer: bytes, request: wire.Request, answer: Answer) -> None:
        group = self._membership.of_connection(peer)
        if group is None:
            return
        kept = self._answers[group.session]
        kept[type(request), request.id] = answer
        if len(kept) > self._answers_kept:
            kept.popitem(last=False)

    def _group(self, peer: bytes) -> Group:
        group = self._membership.of_connection(peer)
        if group is None:
            raise request_error(ErrorCode.NO_SESSION, "this connection has no session", "attach and say hello first")
        return group

    def carry_out(self) -> None:
        """Do what the core has asked for."""
        effects = self._cache.effects
        while effects:
            effect = effects.pop(0)
            match effect:
                case SessionExpired():
                    log.log(
                        logging.WARNING if effect.quarantined_slots else logging.INFO,
                        "session %d is over: %d slots are set aside until its processes are dead",
                        effect.session,
                        effect.quarantined_slots,
                    )
                case SessionEnded():
                    if self._membership.of_session(effect.session) is not None:
                        log.info("session %d ended: %d slots are free again", effect.session, effect.freed_slots)
                    self._answers.pop(effect.session, None)
                    self._forget(self._membership.close(effect.session))

    def on_event(self, event: Event) -> None:
        """What arrived by itself: time, deaths, workers."""
        self._cache.handle(event)
        self.carry_out()

    # --- attach socket ----------------------------------------------------------------------------------------------

    def identify(self, peer: Peer) -> Identified:
        """A scheduler process presents itself."""
        token = self._membership.identify(peer)
        return Identified(member=token, endpoint=self._endpoint, daemon_epoch=self._cache.epoch)

    def join(self, peer: Peer, session_id: SessionId, token: bytes, shard: ShardIndex) -> tuple[Joined, int]:
        """A shard process asks for its memory: the answer and the descriptor to pass on.

        Raises:
            RequestError: no such session or not its token, expired, or no such shard.
        """
        group = self._membership.authenticate(session_id, token)
        session = self._session(group)
        replica = self._replicas[session.pool.name]
        if shard >= replica.layout.shards:
            raise request_error(
                ErrorCode.BAD_VALUE, f"shard {shard} of {replica.layout.shards}", "shards are counted from 0"
            )
        memory = replica.workers.memory_fd(shard)
        self._membership.join(group, peer)
        joined = Joined(
            kind="memfd",
            shard=shard,
            epoch=session.pool.epoch,
            layout=replica.layout,
            slots=replica.slots,
            pool_bytes=replica.layout.pool_bytes(replica.slots),
        )
        return joined, memory

    def peer_lost(self, peer: Peer) -> None:
        """A process is dead: its groups are over, and their slots free once nobody of them lives."""
        self._membership.retire(peer)
        for group in self._membership.of_peer(peer):
            living = group.living()
            log.info("process %d of session %d is dead, %d live", peer.pid, group.session, len(living))
            self.on_event(MemberLost(group.session) if living else MembersDied(group.session))

    def peer_closed(self, peer: Peer) -> bool:
        """A process closed its connection, which is not death. Whether a session needs it watched."""
        self._membership.retire(peer)
        return bool(self._membership.of_peer(peer))

    def _forget(self, peers: list[Peer]) -> None:
        for peer in peers:
            self._membership.retire(peer)
            if self.watch is not None:
                self.watch.forget(peer)

    # --- verbs ------------------------------------------------------------------------------------------------------

    def _hello(self, connection: bytes, request: wire.Hello, _: list[bytes]) -> Answer:
        if not request.version_min <= wire.PROTOCOL_VERSION <= request.version_max:
            raise request_error(
                ErrorCode.UNSUPPORTED_VERSION,
                f"the client speaks {request.version_min} to {request.version_max}, the daemon {wire.PROTOCOL_VERSION}",
                "client and daemon must be at most one version apart: upgrade the older",
            )
        peer = self._membership.claim(request.member)
        replica = self._replicas.get(request.replica)
        if replica is None:
            raise request_error(
                ErrorCode.UNKNOWN_REPLICA,
                f"there is no replica {request.replica!r}",
                f"configured are: {', '.join(sorted(self._replicas))}",
            )
        if request.layout and request.layout != replica.layout.fingerprint():
            raise request_error(
                ErrorCode.WRONG_LAYOUT,
                f"the engine was built for layout {request.layout}, the pool has {replica.layout.fingerprint()}",
                "give daemon and engine the same model, block size, shards and dtype",
            )
        replaced = self._replaced_session(replica.name, connection, peer)
        session = self._cache.open_session(replica.name, self._now_ms())
        group = self._membership.open(session.id, connection, peer)
        self._answers[session.id] = OrderedDict()
        if replaced is not None:  # after the new group is there: its process must stay watched
            self.on_event(MembersDied(replaced.id))
        log.info("session %d: process %d on replica %s", session.id, peer.pid, replica.name)
        return Answer(self._welcome(request, session, group, replica))

    def _replaced_session(self, replica: str, connection: bytes, peer: Peer) -> Session | None:
        """The expired session that this process's hello replaces: saying it again is its word that the old is over.

        Raises:
            Refused: somebody may write into the pool: an active session, or another living process of an expired one.
        """
        if len(connection) != _ROUTING_ID_LENGTH or connection[0]:
            raise request_error(
                ErrorCode.BAD_VALUE, "the connection chose its own routing id", "leave ZMQ_ROUTING_ID unset"
            )
        owned = self._membership.of_connection(connection)
        for session in self._cache.sessions.values():
            group = self._membership.of_session(session.id)
            if group is None or (session.pool.name != replica and group is not owned):
                continue
            others = group.living(beside=peer)
            if session.state is SessionState.ACTIVE or others or session.pool.name != replica:
                pids = sorted({member.pid for member in group.living()})
                raise request_error(
                    ErrorCode.POOL_BUSY,
                    f"{session.state} session {session.id} holds replica {session.pool.name!r} for processes {pids}",
                    "say bye in that session, or end its processes, or use another replica",
                )
            return session
        return None

    def _welcome(self, request: wire.Hello, session: Session, group: Group, replica: Replica) -> wire.Welcome:
        return wire.Welcome(
            id=request.id,
            version=wire.PROTOCOL_VERSION,
            session=session.id,
            token=group.token,
            daemon_epoch=self._cache.epoch,
            epoch=session.pool.epoch,
            generation=replica.generation,
            namespace=replica.namespace,
            key_algorithm=replica.key_algorithm,
            layout=replica.layout,
            slots=replica.slots,
            heartbeat_interval_ms=self._heartbeat_interval_ms,
            session_ttl_ms=self._cache.session_ttl_ms,
            capabilities=tuple(name for name in CAPABILITIES if name in request.capabilities),
        )

    def _match(self, peer: bytes, request: wire.Match, frames: list[bytes]) -> Answer:
        group = self._group(peer)
        hit = self._cache.match(group.session, request.epoch, frames[0], request.tokens, full=request.full)
        return Answer(wire.Matched(id=request.id, device=hit))

    def _acquire(self, peer: bytes, request: wire.Acquire, frames: list[bytes]) -> Answer:
        group = self._group(peer)
        grant = self._cache.acquire(
            group.session,
            request.epoch,
            request.request,
            frames[0],
            request.tokens,
            request.reserve,
            full=request.full,
        )
        header = wire.Acquired(id=request.id, lease=grant.lease, hit=grant.hit)
        return Answer(header, (grant.hit_ranges, grant.ranges))

    def _allocate(self, peer: bytes, request: wire.Allocate, _: list[bytes]) -> Answer:
        group = self._group(peer)
        ranges = self._cache.allocate(group.session, request.epoch, LeaseId(request.lease), request.blocks)
        return Answer(wire.Allocated(id=request.id, blocks=request.blocks), (ranges,))

    def _commit(self, peer: bytes, request: wire.Commit, frames: list[bytes]) -> Answer:
        group = self._group(peer)
        done = self._cache.commit(
            group.session,
            request.epoch,
            LeaseId(request.lease),
            request.start,
            frames[0],
            _slot_ranges(frames[1]),
            FenceSequence(request.fence),
        )
        return Answer(wire.Committed(id=request.id, depth=done.depth, adopted=done.adopted, duplicates=done.duplicates))

    def _release(self, peer: bytes, request: wire.Release, frames: list[bytes]) -> Answer:
        session = self._group(peer).session
        lease, fence = LeaseId(request.lease), FenceSequence(request.fence)
        if not frames:
            self._cache.release(session, request.epoch, lease, fence)
            return Answer(wire.Released(id=request.id))
        keys, slots = frames[0], _slot_ranges(frames[1])
        done = self._cache.finish(session, request.epoch, lease, request.start, keys, slots, fence)
        return Answer(wire.Released(id=request.id, adopted=done.adopted, duplicates=done.duplicates))

    def _heartbeat(self, _: bytes, request: wire.Heartbeat, __: list[bytes]) -> Answer:
        group = self._membership.authenticate(SessionId(request.session), request.token)
        session = self._cache.heartbeat(group.session, FenceSequence(request.fence), self._now_ms())
        generation = self._replicas[session.pool.name].generation
        return Answer(wire.Alive(id=request.id, epoch=session.pool.epoch, generation=generation))

    def _bye(self, peer: bytes, request: wire.Bye, _: list[bytes]) -> Answer:
        group = self._group(peer)
        if group.living(beside=group.scheduler):
            # Its shard processes may write yet: their slots wait for their deaths.
            self.on_event(MemberLost(group.session))
            self._forget(self._membership.part(group, group.scheduler))
        else:
            self._cache.close_session(group.session)
        return Answer(wire.Goodbye(id=request.id))

    def _stats(self, _: bytes, request: wire.Stats, __: list[bytes]) -> Answer:
        return Answer(stats_report(request.id, self._cache, self._now_ms() - self._started_ms))

    def _check(self, _: bytes, request: wire.Check, __: list[bytes]) -> Answer:
        violations = tuple(check(self._cache))
        return Answer(wire.CheckReport(id=request.id, ok=not violations, violations=violations))

    def _describe(self, _: bytes, request: wire.Describe, __: list[bytes]) -> Answer:
        return Answer(description(request.id, self._cache.epoch, list(self._replicas.values())))

    def _session(self, group: Group) -> Session:
        session = self._cache.sessions.get(group.session)
        if session is None or session.state is not SessionState.ACTIVE:
            raise request_error(
                ErrorCode.SESSION_EXPIRED, f"session {group.session} is over", "say hello again, then join"
            )
        return session

    # --- health -----------------------------------------------------------------------------------------------------

    def _start_health_check(self, request: wire.Health, respond: Respond) -> None:
        if len(self._health_tasks) >= HEALTH_CHECKS_PENDING_MAX:
            raise request_error(
                ErrorCode.LIMIT, f"{len(self._health_tasks)} health checks are under way", "wait for one of them"
            )
        task = asyncio.get_running_loop().create_task(self._health(request, respond))
        self._health_tasks.add(task)
        task.add_done_callback(self._health_tasks.discard)

    async def _health(self, request: wire.Health, respond: Respond) -> None:
        try:
            parts: list[wire.HealthPart] = []
            for replica in self._replicas.values():
                parts += await self._health_checks.check(replica, self._now_ms())
                self.carry_out()
            violations = check_counts(self._cache)
            parts.append(wire.HealthPart(part="counts", ok=not violations, detail="; ".join(violations[:3])))
            report = wire.HealthReport(id=request.id, ok=all(part.ok for part in parts), parts=tuple(parts))
            respond(Answer(report))
        except Exception:
            log.exception("internal error during a health check")
            respond(Answer(wire.error_reply(request.id, self.refused(_internal_error()))))


def _internal_error() -> RequestError:
    return request_error(ErrorCode.INTERNAL, "the daemon failed while serving this request", "see the daemon's log")


def _slot_ranges(frame: bytes) -> array[int]:
    ranges = array("i", frame)
    if ranges and (min(ranges[1::2]) <= 0 or min(ranges[::2]) < 0):
        raise request_error(ErrorCode.BAD_VALUE, "a slot range is empty or negative", "send (first slot, count >= 1)")
    return ranges
