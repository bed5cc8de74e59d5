"""A handler with an opinion, and processes that attach."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

from kvcached.process.access import Access, Grants
from kvcached.process.peer import PeerProcess
from kvcached.server.attach import AttachServer
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.protocol.attach import (
    ATTACH_MESSAGE_SIZE_BYTES_MAX,
    Attach,
    AttachReply,
    ClaimedPool,
    ClaimPool,
    Identified,
    Identify,
    Join,
    Joined,
    decode_attach_reply,
    encode_attach,
)
from kvcached_client.types import SessionId, ShardIndex
from tests.worker.groups import SLOTS, tiny_layout

MEMBER = bytes(range(32))
TOKEN = bytes(reversed(range(32)))
IDENTIFIED = Identified(member=MEMBER, endpoint="ipc:///nowhere", daemon_epoch=1)
JOINED = Joined(kind="memfd", shard=0, epoch=1, layout=tiny_layout(), slots=SLOTS, pool_bytes=1 << 10)
JOIN = Join(session=1, token=TOKEN, shard=0)
PATIENCE_S = 20


@dataclass
class Handler:
    """Accepts everybody who shows `TOKEN`, and remembers what it was told."""

    memory: tuple[int, ...] = ()
    keeps_watching: bool = True
    identified: list[PeerProcess] = field(default_factory=list)
    joined: list[PeerProcess] = field(default_factory=list)
    left: list[PeerProcess] = field(default_factory=list)
    closed: asyncio.Queue[PeerProcess] = field(default_factory=asyncio.Queue)
    lost: asyncio.Queue[PeerProcess] = field(default_factory=asyncio.Queue)
    claiming: asyncio.Queue[PeerProcess] = field(default_factory=asyncio.Queue)
    may_claim: asyncio.Event = field(default_factory=asyncio.Event)

    def identify(self, peer: PeerProcess) -> Identified:
        self.identified.append(peer)
        return IDENTIFIED

    def join(
        self, peer: PeerProcess, session_id: SessionId, token: bytes, shard: ShardIndex
    ) -> tuple[Joined, tuple[int, ...]]:
        if token != TOKEN:
            raise request_error(ErrorCode.UNAUTHENTICATED, f"not the token of session {session_id}", "use its token")
        self.joined.append(peer)
        return JOINED, self.memory

    async def claim_pool(
        self, request: ClaimPool, _: Grants, process: PeerProcess | None
    ) -> tuple[ClaimedPool, tuple[int, ...]]:
        if process is not None:
            self.claiming.put_nowait(process)
            await self.may_claim.wait()
        return ClaimedPool(pool=bytes(16), rank_bytes=request.rank_bytes, blocks=request.blocks), self.memory

    def leave(self, peer: PeerProcess) -> None:
        self.left.append(peer)

    def peer_closed(self, peer: PeerProcess) -> bool:
        self.closed.put_nowait(peer)
        return self.keeps_watching

    def peer_lost(self, peer: PeerProcess) -> None:
        self.lost.put_nowait(peer)


def path_in(run_dir: str) -> str:
    return f"{run_dir}/attach.sock"


@asynccontextmanager
async def serving(run_dir: str, handler: Handler, access: Access | None = None) -> AsyncIterator[AttachServer]:
    """A server that listens, closed at the end."""
    server = AttachServer(path_in(run_dir), handler, access or Access())
    server.start()
    try:
        yield server
    finally:
        server.close()


class Client:
    """A connection of this very process, for the loop's thread."""

    def __init__(self, run_dir: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self.socket.connect(path_in(run_dir))

    def send(self, message: Attach | bytes, *descriptors: int) -> None:
        data = message if isinstance(message, bytes) else encode_attach(message)
        socket.send_fds(self.socket, [data], descriptors)

    async def receive(self) -> tuple[AttachReply, list[int]] | None:
        """The next reply and its descriptors, or None where the server has closed the connection."""
        await readable(self.socket.fileno())
        data, descriptors, _, _ = socket.recv_fds(self.socket, ATTACH_MESSAGE_SIZE_BYTES_MAX, 64)
        return (decode_attach_reply(data), descriptors) if data else None

    async def ask(self, message: Attach | bytes, *descriptors: int) -> AttachReply:
        """Send and receive where no descriptor is expected."""
        self.send(message, *descriptors)
        answer = await self.receive()
        assert answer is not None
        assert not answer[1]
        return answer[0]


@contextmanager
def client_in(run_dir: str) -> Iterator[Client]:
    client = Client(run_dir)
    with client.socket:
        yield client


async def readable(descriptor: int) -> None:
    """Wait until a descriptor is readable."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(descriptor, event.set)
    try:
        await asyncio.wait_for(event.wait(), PATIENCE_S)
    finally:
        loop.remove_reader(descriptor)


_ENGINE = """
import os, socket, sys
if sys.argv[3]:
    os.setresuid(*[int(sys.argv[3])] * 3)
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
socket.send_fds(connection, [bytes.fromhex(sys.argv[2])], [os.pidfd_open(os.getpid())])
print(len(connection.recv(65536)), flush=True)
if input() == "close":
    connection.close()
    print("closed", flush=True)
    input()
"""


@contextmanager
def engine(run_dir: str, *, uid: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process that identifies itself, prints the size of the answer, and closes the connection when told so.

    With `uid` it becomes that user first.
    """
    become = "" if uid is None else str(uid)
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _ENGINE, path_in(run_dir), encode_attach(Identify()).hex(), become],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()
        with suppress(BrokenPipeError):
            process.communicate()


async def printed(process: subprocess.Popen[str]) -> str:
    """A process's next line."""
    assert process.stdout is not None
    return (await asyncio.to_thread(process.stdout.readline)).strip()


def tell(process: subprocess.Popen[str], line: str) -> None:
    """Give a process its next line of input."""
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def own_pidfd() -> int:
    return os.pidfd_open(os.getpid())
