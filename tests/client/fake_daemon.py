"""A daemon of a few lines in this process: an attach socket and a ROUTER that answer as the test says."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import zmq

from kvcached_client import KvGroup, Layout
from kvcached_client.protocol.attach import (
    Identified,
    Identify,
    Join,
    Joined,
    JoinedHost,
    decode_attach_request,
    encode_attach,
)
from kvcached_client.protocol.engine import (
    Acquire,
    Acquired,
    Alive,
    Allocate,
    Allocated,
    Bye,
    Commit,
    Committed,
    Goodbye,
    Header,
    Heartbeat,
    Hello,
    HelloOffload,
    Load,
    Loaded,
    Match,
    Matched,
    Release,
    Released,
    Request,
    Settled,
    SlotsAvailable,
    TransferDone,
    WaitForSlots,
    Welcome,
    decode_request,
    encode,
)
from kvcached_client.types import pack_ranges, unpack_ranges
from tests.client.progress_page import ProgressPage

BLOCK_SIZE = 4
SLOTS = 64
LAYOUT = Layout(
    block_size=BLOCK_SIZE,
    shards=1,
    groups=(KvGroup(layers=2, kv_heads=2, head_dim=8, v_head_dim=8, dtype="float16"),),
)
MEMBER, TOKEN, NAMESPACE = b"m" * 32, b"t" * 32, b"n" * 32

#: What a test does with a request: a reply with its frames, `SILENCE` for none at all, None for the default answer.
Script = Callable[[Request, list[bytes]], tuple[Header, list[bytes]] | None]


class FakeDaemon:
    """Answers what an engine asks; `script` may answer first.

    Attributes:
        hit: blocks that a `Load` finds there.
        requests: what came, in order, heartbeats apart.
        heartbeats: those.
        in_session: the connections that have said hello and not bye.
        memory: descriptor that a `Join` gets.
        progress: the progress page that it gets, too.
        replies_together: how many replies are kept until they are sent.
        joined: the answer to a `Join`.
        joined_host: the answer in its place, in offload mode.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.requests: list[tuple[Request, list[bytes]]] = []
        self.heartbeats: list[Heartbeat] = []
        self.in_session: set[bytes] = set()
        self.heartbeat_came = threading.Event()
        self.bye_came = threading.Event()
        self.script: Script | None = None
        self.epoch = 1
        self.capabilities: tuple[str, ...] = ()
        self.hit = 0
        self.memory: int | None = None
        self.progress = ProgressPage.create()
        self.joined_host: JoinedHost | None = None
        self.joined = Joined(kind="memfd", shard=0, epoch=1, layout=LAYOUT, slots=SLOTS, pool_bytes=0)
        self.heartbeat_interval_ms = 60_000
        self.replies_together = 1
        self._kept: list[list[bytes]] = []
        self._next_slot = 0
        self._attached: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(run_dir / "attach.sock"))
        self._listener.listen()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(f"ipc://{run_dir}/rpc.sock")
        self._stop_reader, self._stop_writer = os.pipe()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        """Die: every socket closes."""
        if self._thread.is_alive():
            os.write(self._stop_writer, b"x")
            self._thread.join()
            os.close(self._stop_writer)
            self.progress.close()

    def detach(self) -> None:
        """End every attach connection; the fake daemon's thread calls it, in a script."""
        for peer in self._attached:
            peer.close()
        self._attached.clear()

    def of(self, kind: type[Header]) -> list[Request]:
        """The requests of a verb that came so far."""
        return [request for request, _ in self.requests if isinstance(request, kind)]

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._router, self._listener.fileno(), self._stop_reader):
            poller.register(source, zmq.POLLIN)
        while True:
            ready = {source for source, _ in poller.poll()}
            if self._stop_reader in ready:
                break
            if self._listener.fileno() in ready:
                self._attach()
            if self._router in ready:
                self._serve()
        self._router.close()
        self._context.term()
        for peer in (self._listener, *self._attached):
            peer.close()
        os.close(self._stop_reader)

    def _attach(self) -> None:
        peer, _ = self._listener.accept()
        self._attached.append(peer)
        data, pidfds, _, _ = socket.recv_fds(peer, 16384, 2)
        for pidfd in pidfds:
            os.close(pidfd)
        with contextlib.suppress(ConnectionError):  # a client that was interrupted has gone
            if data:
                self._answer_attach(peer, data)

    def _answer_attach(self, peer: socket.socket, data: bytes) -> None:
        match decode_attach_request(data):
            case Identify():
                reply = Identified(member=MEMBER, endpoint=f"ipc://{self.run_dir}/rpc.sock", daemon_epoch=1)
                socket.send_fds(peer, [encode_attach(reply)], [])
            case Join():
                descriptors = [] if self.memory is None else [self.memory]
                if descriptors and not self.joined_host:
                    descriptors += self.progress.descriptors
                socket.send_fds(peer, [encode_attach(self.joined_host or self.joined)], descriptors)

    def _serve(self) -> None:
        routing_id, header, *frames = self._router.recv_multipart()
        request = decode_request(header)
        if isinstance(request, Heartbeat):
            self.heartbeats.append(request)
        else:
            self.requests.append((request, frames))
        if isinstance(request, (Hello, HelloOffload)):
            self.in_session.add(routing_id)
        elif isinstance(request, Bye):
            self.in_session.discard(routing_id)
        answer = self.script(request, frames) if self.script else None
        if answer is None:
            answer = self._default(request, frames)
        reply, reply_frames = answer
        if isinstance(request, Heartbeat):
            self.heartbeat_came.set()
        if isinstance(request, Bye):
            self.bye_came.set()
        if reply is not SILENCE and getattr(request, "reply", True):
            self._kept.append([routing_id, encode(reply), *reply_frames])
        if len(self._kept) >= self.replies_together:
            for message in self._kept:
                self._router.send_multipart(message)
            self._kept.clear()

    def _grant(self, blocks: int) -> bytes:
        first, self._next_slot = self._next_slot, self._next_slot + blocks
        return pack_ranges([(first, blocks)]) if blocks else b""

    def _default(self, request: Request, frames: list[bytes]) -> tuple[Header, list[bytes]]:  # noqa: C901, PLR0911 - by verb
        match request:
            case Hello():
                return self.welcome(request.id), []
            case Match():
                return Matched(id=request.id, device=2), []
            case Acquire():
                blocks = -(-request.tokens // BLOCK_SIZE) + request.reserve
                return Acquired(id=request.id, lease=7, hit=0, ready=0), [b"", self._grant(blocks)]
            case Allocate():
                return Allocated(id=request.id, blocks=request.blocks), [self._grant(request.blocks)]
            case Commit():
                blocks = sum(count for _, count in unpack_ranges(frames[1]))
                return Committed(id=request.id, depth=request.start + blocks, adopted=blocks, duplicates=0), []
            case Load():
                return Loaded(id=request.id, hit=self.hit), [b""]
            case WaitForSlots():
                return SlotsAvailable(id=request.id, available=0), []
            case Release():
                return Released(id=request.id), []
            case TransferDone():
                return Settled(id=request.id), []
            case Heartbeat():
                return Alive(id=request.id, epoch=self.epoch, generation=1), []
            case Bye():
                return Goodbye(id=request.id), []
            case _:
                return SILENCE, []

    def welcome(self, request_id: int) -> Welcome:
        """The answer to a hello."""
        return Welcome(
            id=request_id,
            version=1,
            session=3,
            token=TOKEN,
            daemon_epoch=1,
            epoch=1,
            generation=1,
            namespace=NAMESPACE,
            key_algorithm="blake3",
            layout=LAYOUT,
            slots=SLOTS,
            heartbeat_interval_ms=self.heartbeat_interval_ms,
            session_ttl_ms=10_000,
            capabilities=self.capabilities,
        )


#: A script's way to leave a request without a reply.
SILENCE = Goodbye(id=0)
