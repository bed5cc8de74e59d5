"""Suite ``saturation``: requests a second against their latency, of 1 to 64 clients, beside a bare echo."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count as count_up
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.configurations import small_replica
from benchmarks.programs import daemon_process, running
from benchmarks.request_rig import BLOCK_BYTES, BLOCK_SIZE, Traffic
from benchmarks.result import Result, Target, judge
from benchmarks.saturation_rig import (
    PROMPT_BLOCKS,
    SHARED_BLOCKS,
    Clients,
    Clock,
    EchoClients,
    Effort,
    EngineClients,
    Load,
    drive,
)
from benchmarks.timing import ROUNDS_MIN
from kvcached_client.types import KEY_SIZE_BYTES

CLIENTS: Final = (1, 2, 4, 8, 16, 32, 64)
#: Of one number of clients, on one server.
SLICE_S: Final = 0.1
#: A round takes seconds where other suites' rounds take milliseconds.
_ROUNDS_PER_PASS: Final = 5
#: Slots of the pool: requests evict the oldest blocks, and the leases of all clients fit.
_SLOTS: Final = 4 * max(CLIENTS) * PROMPT_BLOCKS
_SLAB_BYTES: Final = 1 << 20
#: A pool has one engine. The clients of a managed engine are its requests, which share its connection.
_REPLICAS: Final = 4
_MANAGED: Final = "".join(
    small_replica(f"managed-{index}", model=f"benchmark-{index}", block_size=BLOCK_SIZE, slots=_SLOTS)
    for index in range(_REPLICAS)
)
_OFFLOAD: Final = f"[host]\nsize_bytes = {2 * _SLOTS * BLOCK_BYTES}\nslab_bytes = {_SLAB_BYTES}\n[offload]\n"
_OVER_ECHO: Final = Target("ratio", ">=", 0.5)


@dataclass
class _Curve:
    """What one server gave, by number of clients; an entry for each round."""

    loads: dict[int, list[Load]] = field(default_factory=dict)
    efforts: dict[int, list[Effort]] = field(default_factory=dict)

    def add(self, clients: int, load: Load, effort: Effort) -> None:
        """What a slice gave."""
        self.loads.setdefault(clients, []).append(load)
        self.efforts.setdefault(clients, []).append(effort)

    def best_per_s(self, clients: int) -> float:
        """Requests a second of so many clients, of the best round."""
        return max(load.per_s for load in self.loads[clients])

    def saturated_per_s(self) -> list[float]:
        """The most requests a second that any number of clients got, for each round."""
        return [max(load.per_s for load in loads) for loads in zip(*self.loads.values(), strict=True)]

    def saturated_clients(self) -> int:
        """The number of clients that got most."""
        return max(self.loads, key=self.best_per_s)


@dataclass(frozen=True)
class _Server:
    """A server under load.

    Attributes:
        pid: its process.
        connect: a connection by its index, and a seed of its prompts.
    """

    pid: int
    connect: Callable[[int, int], AbstractContextManager[Clients]]


def run(rounds: int) -> Iterator[Result]:
    """Take turns between the daemon and the echo, from one client to the most."""
    yield from measure(max(ROUNDS_MIN, rounds // _ROUNDS_PER_PASS), SLICE_S, CLIENTS)


def measure(rounds: int, slice_s: float, counts: tuple[int, ...]) -> Iterator[Result]:
    """The same, each number of clients for `slice_s` seconds on each server and in each round."""
    with tempfile.TemporaryDirectory(prefix="kvcached-") as name, ExitStack() as stack:
        directory = Path(name)
        endpoint = f"ipc://{directory / 'echo.sock'}"
        echo = stack.enter_context(running("echo", ["benchmarks.echo", endpoint], directory))
        for case, config, connections_max in (
            ("short_managed", _MANAGED, _REPLICAS),
            ("short_offload_miss", _OFFLOAD, max(counts)),
        ):
            place = directory / case
            with daemon_process(config, place) as daemon:
                connect = partial(_managed if config is _MANAGED else _offload, place / "run")
                traffic = _traffic(connect)
                servers = _Server(daemon.pid, connect), _Server(echo.pid, partial(_echo, endpoint, traffic))
                curves = _measure(servers, connections_max, rounds, slice_s, counts)
            yield from _results(case, *curves)


def _managed(run_dir: Path, index: int, seed: int) -> EngineClients:
    shared = random.Random("shared").randbytes(SHARED_BLOCKS * KEY_SIZE_BYTES)
    return EngineClients.managed(run_dir, f"managed-{index}", shared, seed)


def _offload(run_dir: Path, _: int, seed: int) -> EngineClients:
    return EngineClients.offload(run_dir, seed)


def _traffic(connect: Callable[[int, int], EngineClients]) -> Traffic:
    """Of a request, once the blocks are there that all prompts begin with."""
    with connect(0, 0) as engine:
        engine.traffic()
        return engine.traffic()


def _echo(endpoint: str, traffic: Traffic, _: int, __: int) -> EchoClients:
    return EchoClients(endpoint, traffic)


def _measure(
    servers: tuple[_Server, _Server], connections_max: int, rounds: int, slice_s: float, counts: tuple[int, ...]
) -> tuple[_Curve, _Curve]:
    """Curves of both servers, after a round that does not count."""
    curves, seeds = (_Curve(), _Curve()), count_up(1)
    for number in range(rounds + 1):
        for count in counts:
            connections_count = min(count, connections_max)
            pairs = list(zip(servers, curves, strict=True))
            for server, curve in pairs if number % 2 else reversed(pairs):
                with ExitStack() as stack:
                    connections = [
                        stack.enter_context(server.connect(index, next(seeds))) for index in range(connections_count)
                    ]
                    clock = Clock(server.pid)
                    load, effort = drive(connections, count, slice_s), clock.stop()
                if number:
                    curve.add(count, load, effort)
    return curves


def _results(case: str, daemon: _Curve, echo: _Curve) -> Iterator[Result]:
    for count in daemon.loads:
        value, floor = daemon.best_per_s(count), echo.best_per_s(count)
        yield judge("saturation", f"{case}_{count}_clients_per_s", value, "1/s", floor=floor)
        for metric in ("p50_us", "p99_us"):
            value, floor = (min(getattr(load, metric) for load in curve.loads[count]) for curve in (daemon, echo))
            yield judge("saturation", f"{case}_{count}_clients_{metric}", value, "us", floor=floor)
    values, floors = daemon.saturated_per_s(), echo.saturated_per_s()
    yield judge("saturation", f"{case}_saturated_per_s", max(values), "1/s", floor=max(floors), target=_OVER_ECHO)
    middle = median(value / floor for value, floor in zip(values, floors, strict=True))
    yield judge("saturation", f"{case}_saturated_median_ratio", middle, "ratio")
    cpu_us = {}
    for name, curve in (("daemon", daemon), ("echo", echo)):
        count = curve.saturated_clients()
        efforts = curve.efforts[count]
        yield judge("saturation", f"{case}_{name}_saturating_clients", count, "clients")
        awake = median(effort.awake for effort in efforts)
        yield judge("saturation", f"{case}_{name}_awake_ratio", awake, "ratio")
        served = zip(curve.loads[count], efforts, strict=True)
        cpu_us[name] = min(effort.cpu_ns / 1e3 / load.requests for load, effort in served)
    yield judge("saturation", f"{case}_daemon_cpu_us", cpu_us["daemon"], "us", floor=cpu_us["echo"])
