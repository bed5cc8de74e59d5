"""Suite ``rpc``: an acquire over the real socket of a real daemon, against a bare echo of the same bytes."""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter_ns
from typing import Final, cast

import numpy as np
import zmq

from benchmarks.configurations import small_replica
from benchmarks.echo import open_dealer
from benchmarks.programs import daemon, running
from benchmarks.result import Result, Target, judge
from kvcached_client import Client
from kvcached_client.keys import KeyChain
from kvcached_client.protocol.engine import (
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    Acquire,
    Acquired,
    Commit,
    Committed,
    Header,
    Hello,
    Release,
    Request,
    Welcome,
    decode_reply,
    encode,
    raise_for_error,
)
from kvcached_client.transport.attach import identify

_BLOCK_SIZE: Final = 16
#: Keys of 16 bytes: 16 KiB. One token more than they cover, as prompts seldom end with a block.
_BLOCKS: Final = 1024
_TOKENS: Final = _BLOCKS * _BLOCK_SIZE + 1
_PAIRS_PER_ROUND: Final = 20
_WARM_UP_ROUNDS: Final = 10
_DEADLINE_MS: Final = 10_000
_CONFIG: Final = "".join(
    small_replica(name, model=f"benchmark-{name}", block_size=_BLOCK_SIZE, slots=2 * _BLOCKS)
    for name in ("client", "wire")
)


def run(rounds: int) -> Iterator[Result]:
    """Measure a fully cached prompt: match, pin and reply, with one new slot.

    ``acquire`` is the whole call of the SDK. ``wire`` sends a request that is encoded already and reads the reply's
    bytes, so its difference to the echo is the daemon's part.
    """
    with tempfile.TemporaryDirectory(prefix="kvcached-") as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        context: zmq.Context[zmq.Socket[bytes]] = stack.enter_context(zmq.Context())
        run_dir = stack.enter_context(daemon(_CONFIG, directory))
        tokens = np.random.default_rng(0).integers(0, 128_256, _TOKENS, dtype=np.int32)
        client = stack.enter_context(_Sdk(run_dir, tokens))
        wire = stack.enter_context(_Wire(run_dir, tokens, context))
        endpoint = f"ipc://{directory / 'echo.sock'}"
        stack.enter_context(running("echo", ["benchmarks.echo", endpoint], directory))
        echo = stack.enter_context(_Echo(endpoint, wire.exchange(), context))
        cases: dict[str, Callable[[], int]] = {"acquire": client.acquire, "echo": echo.exchange, "wire": wire.acquire}
        _take_turns(cases, _WARM_UP_ROUNDS * _PAIRS_PER_ROUND)
        yield from _results(_take_turns(cases, rounds * _PAIRS_PER_ROUND))


def _take_turns(cases: dict[str, Callable[[], int]], turns: int) -> dict[str, list[int]]:
    """Nanoseconds of every case in every turn; turns alternate their order."""
    times: dict[str, list[int]] = {name: [] for name in cases}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for turn in range(turns):
            for name in reversed(cases) if turn % 2 else cases:
                times[name].append(cases[name]())
    finally:
        if collecting:
            gc.enable()
    return times


def _results(times: dict[str, list[int]]) -> Iterator[Result]:
    target = Target("value", "<=", 1.6)
    for name, limit in (("acquire", (target,)), ("wire", ())):
        ratios = [case / echo for case, echo in zip(times[name], times["echo"], strict=True)]
        tenths = quantiles(ratios, n=10)
        yield judge("rpc", f"{name}_over_echo_ratio", median(ratios), "ratio", target=limit)
        yield judge("rpc", f"{name}_over_echo_p10_ratio", tenths[0], "ratio")
        yield judge("rpc", f"{name}_over_echo_p90_ratio", tenths[-1], "ratio")
    for name, measured in times.items():
        yield judge("rpc", f"{name}_us", median(measured) / 1e3, "us")


class _Sdk(contextlib.AbstractContextManager["_Sdk"]):
    """An engine with the client library."""

    def __init__(self, run_dir: Path, tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        self._client = Client.connect(run_dir, replica="client", deadline_ms=_DEADLINE_MS)
        self._chain = self._client.chain(tokens)
        self._client.acquire("fill", self._chain).finish(_TOKENS)
        self._requests = 0

    def acquire(self) -> int:
        """Acquire and release; nanoseconds of the acquire."""
        self._requests += 1
        name = f"request-{self._requests}"
        start = perf_counter_ns()
        lease = self._client.acquire(name, self._chain)
        spent = perf_counter_ns() - start
        assert lease.hit_blocks == _BLOCKS
        lease.release()
        return spent

    def __exit__(self, *_: object) -> None:
        self._client.close()


class _Wire(contextlib.AbstractContextManager["_Wire"]):
    """An engine that speaks the protocol on a bare socket, one blocking request at a time."""

    def __init__(
        self,
        run_dir: Path,
        tokens: np.ndarray[tuple[int], np.dtype[np.int32]],
        context: zmq.Context[zmq.Socket[bytes]],
    ) -> None:
        self._last_id = 0
        self._attached, identified = identify(run_dir, deadline_ms=_DEADLINE_MS)
        self._socket = open_dealer(context, identified.endpoint)
        hello = Hello(
            id=self._next_id(),
            version_min=PROTOCOL_VERSION_MIN,
            version_max=PROTOCOL_VERSION,
            member=identified.member,
            replica="wire",
        )
        welcome = cast("Welcome", self._ask(hello)[0])
        self._epoch = welcome.epoch
        self._keys = KeyChain(welcome.namespace, _BLOCK_SIZE, tokens, algorithm=welcome.key_algorithm).keys
        acquired, frames = self._ask(self._request(), self._keys)
        lease = cast("Acquired", acquired).lease
        first, count = np.frombuffer(frames[1], np.int32)[:2]
        assert count > _BLOCKS  # an empty pool grants one range; the last slot is for the token after the keys
        slots = np.array([first, _BLOCKS], np.int32).tobytes()
        commit = Commit(id=self._next_id(), epoch=self._epoch, lease=lease, start=0)
        assert cast("Committed", self._ask(commit, self._keys, slots)[0]).adopted == _BLOCKS
        self._release(lease)

    def acquire(self) -> int:
        """Acquire and release; nanoseconds between the first byte sent and the last received."""
        parts = [encode(self._request()), self._keys]
        start = perf_counter_ns()
        self._socket.send_multipart(parts)
        reply = self._socket.recv_multipart()
        spent = perf_counter_ns() - start
        acquired = cast("Acquired", raise_for_error(decode_reply(reply[0])))
        assert acquired.hit == _BLOCKS
        self._release(acquired.lease)
        return spent

    def exchange(self) -> tuple[list[bytes], list[bytes]]:
        """The bytes of a request and of its reply."""
        request = [encode(self._request()), self._keys]
        self._socket.send_multipart(request)
        reply = self._socket.recv_multipart()
        self._release(cast("Acquired", raise_for_error(decode_reply(reply[0]))).lease)
        return request, reply

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _request(self) -> Acquire:
        number = self._next_id()
        return Acquire(id=number, epoch=self._epoch, request=f"request-{number}", tokens=_TOKENS)

    def _release(self, lease: int) -> None:
        self._ask(Release(id=self._next_id(), epoch=self._epoch, lease=lease))

    def _ask(self, request: Request, *frames: bytes) -> tuple[Header, list[bytes]]:
        self._socket.send_multipart([encode(request), *frames])
        header, *reply_frames = self._socket.recv_multipart()
        return raise_for_error(decode_reply(header)), reply_frames

    def __exit__(self, *_: object) -> None:
        self._socket.close(linger=0)
        self._attached.close()


class _Echo(contextlib.AbstractContextManager["_Echo"]):
    """The same socket and bytes, with nobody behind them who thinks."""

    def __init__(
        self, endpoint: str, exchange: tuple[list[bytes], list[bytes]], context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        self._request, self._reply = exchange
        self._socket = open_dealer(context, endpoint)
        self._socket.send_multipart(self._reply)
        assert self._socket.recv_multipart() == self._reply

    def exchange(self) -> int:
        """Nanoseconds from the request to the reply."""
        start = perf_counter_ns()
        self._socket.send_multipart(self._request)
        reply = self._socket.recv_multipart()
        spent = perf_counter_ns() - start
        assert reply == self._reply
        return spent

    def __exit__(self, *_: object) -> None:
        self._socket.close(linger=0)
