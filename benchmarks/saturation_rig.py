"""Many clients in one thread, as the suite ``saturation`` drives them: each waits for its answer, then asks again.

A connection serves one client or several; each of them has one request under way. It does nothing but the messages:
keys are random bytes, not hashes. So one thread can keep a server busy; whether it did is told by the server's clock,
see `Clock`.
"""

from __future__ import annotations

import gc
import random
import select
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import quantiles
from time import perf_counter_ns, sleep
from typing import Final, NamedTuple, Protocol, Self, cast

from benchmarks.request_rig import BLOCK_BYTES, BLOCK_SIZE, DEADLINE_MS, Traffic
from kvcached_client.errors import DaemonUnreachable
from kvcached_client.offload import new_instance
from kvcached_client.protocol.engine import (
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    Acquire,
    Acquired,
    Bye,
    Header,
    Held,
    Hello,
    HelloOffload,
    Release,
    Request,
    Welcome,
    WelcomeOffload,
    decode_reply,
    encode,
    raise_for_error,
)
from kvcached_client.transport.attach import identify
from kvcached_client.transport.connection import Connection
from kvcached_client.types import KEY_SIZE_BYTES

_IPC: Final = "ipc://"
#: Between two looks for an answer, where no time is taken.
_PAUSE_S: Final = 0.001
#: The fewest that have percentiles.
_TIMES_MIN: Final = 2
#: Of each prompt, and how many of them all prompts begin with.
PROMPT_BLOCKS: Final = 32
SHARED_BLOCKS: Final = 16


class Clients(Protocol):
    """Clients of a server that share a connection, by number."""

    connection: Connection

    def begin(self, client: int) -> None:
        """Send the first message of a client's next request."""

    def advance(self) -> list[int]:
        """Take what has arrived and go on; the clients whose requests are over."""


class Load(NamedTuple):
    """What a number of clients got.

    Attributes:
        requests: that ended in time.
        per_s: of these, in a second.
        p50_us: of a request, from its first message to its last reply.
        p99_us: the slowest in a hundred.
    """

    requests: int
    per_s: float
    p50_us: float
    p99_us: float


class Effort(NamedTuple):
    """What a server did in a time.

    Attributes:
        awake: share of the time in which its busiest thread ran, or waited for nothing but a processor. Near 1, the
            server is what limits its throughput; below that, it waited for requests.
        cpu_ns: processor time of all its threads.
    """

    awake: float
    cpu_ns: int


class Clock:
    """The kernel's account of a process's threads: how long each ran, and waited for a processor."""

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f"/proc/{pid}/task")
        self._start_ns = perf_counter_ns()
        self._before = self._read()

    def stop(self) -> Effort:
        """What the process did since this clock was made."""
        wall_ns = perf_counter_ns() - self._start_ns
        spent = [
            (run - before_run, waited - before_waited)
            for task, (run, waited) in self._read().items()
            for before_run, before_waited in (self._before.get(task, (0, 0)),)
        ]
        return Effort(max(map(sum, spent)) / wall_ns, sum(run for run, _ in spent))

    def _read(self) -> dict[str, tuple[int, int]]:
        accounts = {task.name: (task / "schedstat").read_text().split() for task in self._tasks.iterdir()}
        return {name: (int(run), int(waited)) for name, (run, waited, _) in accounts.items()}


class EchoClients(AbstractContextManager["EchoClients"]):
    """Clients of `benchmarks.echo`: as many messages as a request has, and together as many bytes."""

    def __init__(self, endpoint: str, traffic: Traffic) -> None:
        self.connection = _connect(endpoint)
        self._last_call = traffic.calls
        self._request = bytes(traffic.sent_bytes // traffic.calls)
        self._under_way: deque[tuple[int, int]] = deque()  #: client and number of the call, in the order of answers
        self.connection.send([bytes(traffic.received_bytes // traffic.calls)])
        _wait(self.connection)

    def begin(self, client: int) -> None:
        """See `Clients`."""
        self._send(client, 1)

    def advance(self) -> list[int]:
        """See `Clients`."""
        over = []
        for _ in _received(self.connection):
            client, call = self._under_way.popleft()
            if call == self._last_call:
                over.append(client)
            else:
                self._send(client, call + 1)
        return over

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def _send(self, client: int, call: int) -> None:
        self._under_way.append((client, call))
        self.connection.send([self._request])


class EngineClients(AbstractContextManager["EngineClients"]):
    """An engine's requests: `acquire`, and a `release` that commits what was not hit where there are slots for it.

    Args:
        run_dir: of the daemon.
        hello: makes the message that opens its session, of the token that identifies this process.
        seed: of its prompts' own keys.
        shared: keys that every prompt begins with.
    """

    def __init__(self, run_dir: Path, hello: Callable[[bytes], Hello | HelloOffload], seed: int, shared: bytes) -> None:
        self._attached, identified = identify(run_dir, deadline_ms=DEADLINE_MS)
        self.connection = _connect(identified.endpoint)
        self._random, self._shared = random.Random(seed), shared
        self._own_bytes = PROMPT_BLOCKS * KEY_SIZE_BYTES - len(shared)
        self._last_id = 1  # that of the hello
        self._under_way: dict[int, tuple[int, bytes]] = {}  #: client and its prompt's keys, by id of the message
        self._sent_bytes = self._received_bytes = 0
        self._epoch = cast("Welcome | WelcomeOffload", self._ask(hello(identified.member))).epoch

    @classmethod
    def managed(cls, run_dir: Path, replica: str, shared: bytes, seed: int) -> Self:
        """An engine on a device pool of the daemon."""
        hello = partial(Hello, id=1, version_min=PROTOCOL_VERSION_MIN, version_max=PROTOCOL_VERSION, replica=replica)
        return cls(run_dir, lambda member: hello(member=member), seed, shared)

    @classmethod
    def offload(cls, run_dir: Path, seed: int) -> Self:
        """An engine with device memory of its own, whose prompts never hit."""
        hello = partial(
            HelloOffload,
            id=1,
            version_min=PROTOCOL_VERSION_MIN,
            version_max=PROTOCOL_VERSION,
            engine="benchmark",
            instance=new_instance(),
            label="benchmark",
            keyspace=bytes(32),
            block_size=BLOCK_SIZE,
            shards=1,
            block_bytes=BLOCK_BYTES,
            fingerprint=bytes(16),
        )
        return cls(run_dir, lambda member: hello(member=member), seed, b"")

    def begin(self, client: int) -> None:
        """See `Clients`."""
        keys = self._shared + self._random.randbytes(self._own_bytes)
        number = self._next_id()
        self._under_way[number] = client, keys
        tokens = PROMPT_BLOCKS * BLOCK_SIZE
        self._send(Acquire(id=number, epoch=self._epoch, request=f"request-{number}", tokens=tokens), keys)

    def advance(self) -> list[int]:
        """See `Clients`."""
        over = []
        for header, *frames in _received(self.connection):
            self._received_bytes += len(header) + sum(map(len, frames))
            reply = raise_for_error(decode_reply(header))
            client, keys = self._under_way.pop(reply.id)
            if not isinstance(reply, (Acquired, Held)):
                over.append(client)
                continue
            number = self._next_id()
            self._under_way[number] = client, b""
            if isinstance(reply, Held):
                self._send(Release(id=number, epoch=self._epoch, lease=reply.lease))
            else:
                release = Release(id=number, epoch=self._epoch, lease=reply.lease, start=reply.hit)
                self._send(release, keys[reply.hit * KEY_SIZE_BYTES :], frames[1])
        return over

    def traffic(self) -> Traffic:
        """Do one request; what it sent and received."""
        self._sent_bytes = self._received_bytes = 0
        before = self._last_id
        self.begin(0)
        while not self.advance():
            sleep(_PAUSE_S)
        return Traffic(self._last_id - before, self._sent_bytes, self._received_bytes)

    def __exit__(self, *_: object) -> None:
        if not self.connection.is_over:
            self._ask(Bye(id=self._next_id()))
        self.connection.close()
        self._attached.close()

    def _ask(self, request: Request) -> Header:
        self._send(request)
        return raise_for_error(decode_reply(_wait(self.connection)[0]))

    def _send(self, request: Request, *frames: bytes) -> None:
        parts = [encode(request), *frames]
        self._sent_bytes += sum(map(len, parts))
        self.connection.send(parts)

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id


def drive(connections: Sequence[Clients], clients: int, seconds: float) -> Load:
    """So many clients at once on these connections. Requests that are under way at the end do not count.

    Raises:
        DaemonUnreachable: the server has closed a connection, or does not answer.
    """
    times_ns: list[int] = []
    with _uncollected(), select.epoll() as poller:
        by_descriptor = {each.connection.fileno(): each for each in connections}
        for descriptor in by_descriptor:
            poller.register(descriptor, select.EPOLLIN)
        descriptors = islice(cycle(by_descriptor), clients)
        start_ns = last_ns = perf_counter_ns()
        end_ns = start_ns + int(seconds * 1e9)
        started_ns = {(descriptor, client): start_ns for client, descriptor in enumerate(descriptors)}
        for descriptor, client in started_ns:
            by_descriptor[descriptor].begin(client)
        while started_ns:
            ready = poller.poll(DEADLINE_MS / 1e3)
            if not ready:
                raise DaemonUnreachable("no answer")
            for descriptor, _ in ready:
                for client in by_descriptor[descriptor].advance():
                    now_ns = perf_counter_ns()
                    if now_ns >= end_ns and len(times_ns) >= _TIMES_MIN:
                        del started_ns[descriptor, client]
                        continue
                    times_ns.append(now_ns - started_ns[descriptor, client])
                    last_ns = started_ns[descriptor, client] = now_ns
                    by_descriptor[descriptor].begin(client)
    percentiles, requests = quantiles(times_ns, n=100), len(times_ns)
    per_s = requests / (max(last_ns, end_ns) - start_ns) * 1e9
    return Load(requests, per_s, percentiles[49] / 1e3, percentiles[98] / 1e3)


@contextmanager
def _uncollected() -> Iterator[None]:
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _connect(endpoint: str) -> Connection:
    """A connection that can be sent to."""
    connection = Connection(endpoint.removeprefix(_IPC), deadline_ms=DEADLINE_MS)
    while not connection.is_ready:
        _received(connection)
        sleep(_PAUSE_S)
    return connection


def _wait(connection: Connection) -> list[bytes]:
    """The parts of the next message."""
    while not (messages := _received(connection)):
        sleep(_PAUSE_S)
    return messages[0]


def _received(connection: Connection) -> list[list[bytes]]:
    messages: list[list[bytes]] = []
    connection.receive(lambda message: messages.append(message.parts))
    if connection.is_over:
        raise DaemonUnreachable("the server has closed the connection")
    return messages
