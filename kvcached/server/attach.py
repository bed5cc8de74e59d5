"""The attach socket's server: receives, checks and answers; what to answer is the handler's decision.

A connection that closes says nothing about the process. So a peer that the handler accepted is watched through its
pidfd until it dies or the handler forgets it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from typing import Final, Protocol

from kvcached.process.access import Access, Grants
from kvcached.process.peer import PeerProcess
from kvcached.process.seqpacket import Packet, peer_credentials, peer_groups, receive, send
from kvcached.server.connections import ConnectionLimits, Connections, no_descriptors
from kvcached.server.listener import Listener, remove_stale
from kvcached.server.turns import Turns
from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.failpoints import failpoint
from kvcached_client.protocol.attach import (
    ATTACH_MESSAGE_SIZE_BYTES_MAX,
    Attach,
    AttachRefused,
    ClaimedPool,
    ClaimPool,
    Identified,
    Identify,
    Join,
    Joined,
    JoinedHost,
    Leave,
    decode_attach_request,
    encode_attach,
)
from kvcached_client.types import SessionId, ShardIndex

#: A node has a few dozen engine processes; each keeps one connection per session, two while it starts.
CONNECTIONS_MAX: Final = 512
#: Of the descriptors that are left where there are few; the rest is for rpc.sock, processes and workers.
DESCRIPTORS_SHARE: Final = 0.2
#: Accepted processes that live on, connected or not. Each costs a descriptor of the daemon.
PEERS_MAX: Final = 512
#: Of one user other than the daemon's own.
USER_PEERS_MAX: Final = PEERS_MAX // 4
#: A request carries one descriptor; room for a second one shows a peer that sends more.
_DESCRIPTORS_MAX: Final = 2

_log: Final = logging.getLogger(__name__)


class AttachHandler(Protocol):
    """Who decides. Every method is called in the loop's thread; all but `claim_pool` answer at once."""

    def identify(self, peer: PeerProcess) -> Identified:
        """Accept a process, or raise RequestError: it is refused then."""

    def join(
        self, peer: PeerProcess, session_id: SessionId, token: bytes, shard: ShardIndex
    ) -> tuple[Joined | JoinedHost, tuple[int, ...]]:
        """What a shard's process gets, and the descriptors that it maps, which stay the handler's; or RequestError."""

    async def claim_pool(
        self, request: ClaimPool, grants: Grants, process: PeerProcess | None
    ) -> tuple[ClaimedPool, tuple[int, ...]]:
        """What a process of an engine gets, and the descriptors, which stay the handler's; or RequestError.

        This one may take a while. `process` comes with requests for memory of a CUDA device, and is the handler's.
        """

    def leave(self, peer: PeerProcess) -> None:
        """A process that joined touches the memory no more."""

    def peer_closed(self, peer: PeerProcess) -> bool:
        """An accepted process closed its connection, which is not death. Whether to go on watching it."""

    def peer_lost(self, peer: PeerProcess) -> None:
        """An accepted process is dead, and no longer watched."""


class _Connection:
    """An open connection.

    Attributes:
        grants: what its user may do.
        peer: its process from the first request on.
        joined: whether a shard process waits for its copies here, and must see the end of its session.
    """

    __slots__ = ("grants", "joined", "peer", "socket")

    def __init__(self, connection: socket.socket, grants: Grants) -> None:
        self.socket = connection
        self.grants = grants
        self.peer: PeerProcess | None = None
        self.joined = False


class AttachServer:
    """Listens at `path` and serves until `close`. Lives in one event loop's thread; never waits.

    Each accepted connection has a `PeerProcess` of its own, though a process may have several connections.

    Args:
        path: of the socket.
        handler: who decides.
        access: who may do what; only engines may attach.

    Attributes:
        access: the same.
        refusals: how many requests and connections were refused, by code.
    """

    def __init__(self, path: str, handler: AttachHandler, access: Access) -> None:
        self.access = access
        self._path = path
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._listener: Listener[_Connection] | None = None
        self._limits = ConnectionLimits.within(CONNECTIONS_MAX, DESCRIPTORS_SHARE)
        self._connections: Connections[_Connection] = Connections("attach", self._limits, self._drop, access)
        self._turns = Turns(self._on_readable)
        self._watched: set[PeerProcess] = set()
        self._claims: set[asyncio.Task[None]] = set()
        self.refusals: Counter[ErrorCode] = Counter()

    def start(self) -> None:
        """Listen.

        Raises:
            OSError: the socket cannot be made, or another process serves it.
        """
        remove_stale(self._path, socket.SOCK_SEQPACKET)
        self._listener = Listener("attach", self._path, socket.SOCK_SEQPACKET, self._connections, self._accept)

    def close(self) -> None:
        """Close everything, tell the handler nothing, and remove the socket. Does nothing the second time."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for claim in self._claims:
            claim.cancel()
        for connection in list(self._connections):
            self._drop(connection)
        for peer in list(self._watched):
            self.forget(peer)
        self._turns.close()

    def forget(self, peer: PeerProcess) -> None:
        """Stop watching a process and close its pidfd.

        A connection that joined a session is closed: whoever waits for a copy learns by it that there will be none.
        Any other may introduce its process again.
        """
        if peer in self._watched:
            self._watched.discard(peer)
            self._loop.remove_reader(peer.fileno())
        for connection in [each for each in self._connections if each.peer is peer]:
            connection.peer = None
            if connection.joined:
                self._drop(connection)
        peer.close()

    def _accept(self, accepted: socket.socket) -> None:
        credentials = peer_credentials(accepted)
        grants = self._connections.access.grants(credentials, peer_groups(accepted))
        connection = _Connection(accepted, grants)
        self._connections.open(connection, credentials, grants, accepted.fileno())
        self._turns.watch(connection, accepted.fileno(), credentials.user)

    def _on_readable(self, connection: _Connection) -> None:
        try:
            packet = receive(connection.socket, ATTACH_MESSAGE_SIZE_BYTES_MAX, _DESCRIPTORS_MAX)
        except BlockingIOError:
            return
        except ConnectionError:
            packet = None
        if packet is None:
            self._drop(connection)
            return
        try:
            self._serve(connection, packet)
        except RequestError as error:
            self._refuse(connection, error)
        except Exception:  # noqa: BLE001  one request's failure must not end the daemon
            _log.exception("attach: internal error")
            self._refuse(connection, _internal_error())
        finally:
            packet.close()

    def _serve(self, connection: _Connection, packet: Packet) -> None:
        self._connections.admit(connection)
        if packet.cut:
            raise request_error(
                ErrorCode.OVERSIZE,
                f"an attach message has at most {ATTACH_MESSAGE_SIZE_BYTES_MAX} bytes and one descriptor",
                "send what docs/protocol.md describes",
            )
        request = decode_attach_request(packet.data)
        connection.grants.check_engine(str(type(request).__struct_config__.tag))
        if isinstance(request, Leave):
            self._leave(connection)
            return
        if isinstance(request, ClaimPool):
            self._begin_claim(connection, request, packet)
            return
        if connection.peer is None:
            connection.peer = PeerProcess.of(connection.socket, packet.descriptors, connection.grants)
        peer = connection.peer
        if peer not in self._watched:
            self._check_room(peer)
        reply: Attach
        descriptors: tuple[int, ...] = ()
        match request:
            case Identify():
                reply = self._handler.identify(peer)
            case Join(session=session, token=token, shard=shard):
                reply, descriptors = self._handler.join(peer, SessionId(session), token, ShardIndex(shard))
                connection.joined = True
        self.watch(peer)
        failpoint("daemon.attach")
        self._answer(connection, reply, descriptors)

    def _begin_claim(self, connection: _Connection, request: ClaimPool, packet: Packet) -> None:
        """Its own locks say whether the process lives, unless they cannot: then the handler gets its pidfd."""
        process = None
        if request.device and request.rank is not None:
            process = PeerProcess.of(connection.socket, packet.descriptors, connection.grants)
            if process.fileno() >= self._limits.descriptor:
                process.close()
                raise no_descriptors()
        task = self._loop.create_task(self._claim(connection, request, process))
        self._claims.add(task)
        task.add_done_callback(self._claims.discard)

    async def _claim(self, connection: _Connection, request: ClaimPool, process: PeerProcess | None) -> None:
        try:
            answer = await self._handler.claim_pool(request, connection.grants, process)
        except RequestError as error:
            self._refuse(connection, error)
        except Exception:  # noqa: BLE001  as in `_on_readable`
            _log.exception("attach: internal error")
            self._refuse(connection, _internal_error())
        else:
            self._answer(connection, *answer)

    def _leave(self, connection: _Connection) -> None:
        if not connection.joined or connection.peer is None:
            raise request_error(ErrorCode.BAD_VALUE, "this connection has joined no session", "join before you leave")
        self._handler.leave(connection.peer)
        self._drop(connection)

    def _check_room(self, peer: PeerProcess) -> None:
        if len(self._watched) >= PEERS_MAX:
            raise request_error(ErrorCode.LIMIT, f"{PEERS_MAX} processes are attached", "end those that are not needed")
        if not peer.grants.is_own and sum(each.uid == peer.uid for each in self._watched) >= USER_PEERS_MAX:
            what = f"{USER_PEERS_MAX} processes of {peer.grants.user} are attached"
            raise request_error(ErrorCode.LIMIT, what, "end those that are not needed")
        if peer.fileno() >= self._limits.descriptor:
            raise no_descriptors()

    def watch(self, peer: PeerProcess) -> None:
        """Tell the handler of a process's death, until it is forgotten."""
        if peer not in self._watched:
            self._watched.add(peer)
            self._loop.add_reader(peer.fileno(), self._on_dead, peer)

    def _on_dead(self, peer: PeerProcess) -> None:
        if not peer.is_dead():  # asked while the descriptor is open; the answer stays
            return
        for connection in [each for each in self._connections if each.peer is peer]:
            self._on_readable(connection)  # that it left, if it said so before its end
            connection.peer = None
            self._drop(connection)
        if peer in self._watched:
            self.forget(peer)
            self._handler.peer_lost(peer)

    def _answer(self, connection: _Connection, reply: Attach, descriptors: tuple[int, ...] = ()) -> None:
        if connection.socket.fileno() < 0:
            return  # closed while the answer was made
        try:
            send(connection.socket, encode_attach(reply), descriptors)
        except OSError as error:
            # A peer that asks and does not read the answers has nothing to wait for.
            words = "attach: no answer possible: %(reason)s"
            self._connections.sampled.note("unanswered", words, {"reason": str(error)})
            self._drop(connection)

    def _refuse(self, connection: _Connection, error: RequestError) -> None:
        self.refusals[error.code] += 1
        if connection.socket.fileno() < 0:
            return
        peer = connection.peer or peer_credentials(connection.socket)
        fields = {"peer": str(peer), "reason": error.message}
        self._connections.note_fault(f"refused {error.code}", "attach: refused %(peer)s: %(reason)s", fields)
        self._answer(
            connection, AttachRefused(code=error.code, fault=error.fault, message=error.message, fix=error.fix)
        )
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        """Close a connection; its process is watched on if it was accepted and the handler wants that."""
        descriptor = connection.socket.fileno()
        if descriptor < 0:
            return
        self._connections.close(connection)
        self._turns.unwatch(descriptor)
        connection.socket.close()
        peer, connection.peer = connection.peer, None
        if peer is None:
            return
        if peer not in self._watched or (self._listener is not None and not self._handler.peer_closed(peer)):
            self.forget(peer)


def _internal_error() -> RequestError:
    return request_error(ErrorCode.INTERNAL, "the daemon failed to serve this request", "see the daemon's log")
