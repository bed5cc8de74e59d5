"""Connections between engines and the daemon: messages are late, lost, doubled, or overtake each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tests.simulation.process import Process
from tests.simulation.scheduler import MS, Chance, Scheduler

_USUAL_US = (50, 2 * MS)
_LATE_US = (20 * MS, 600 * MS)


class Receiver(Protocol):
    """The daemon, as messages come to it."""

    process: Process

    def receive(self, connection: Connection, parts: list[bytes]) -> None:
        """A message of a connection."""


@dataclass
class Weather:
    """How likely it is that a message is lost, doubled, late, or not kept in its place."""

    drop: float = 0.0
    double: float = 0.0
    late: float = 0.0
    reorder: float = 0.0

    @staticmethod
    def drawn(chance: Chance) -> Weather:
        """Some kinds of trouble, of some strength."""

        def rate(most: float) -> float:
            return chance.among([0.0, most / 4, most])

        return Weather(rate(0.08), rate(0.08), rate(0.06), rate(0.15))


@dataclass(eq=False)
class Connection:
    """One end of a connection, that of a process.

    Attributes:
        id: as the daemon knows it.
        receive: takes in what the daemon sends.
    """

    id: bytes
    process: Process
    receive: Callable[[list[bytes]], None]
    closed: bool = False
    sent_us: int = 0  #: when the last message to the daemon arrives that keeps its place
    answered_us: int = 0  #: the same in the other direction


class Network:
    """Carries messages.

    Attributes:
        weather: how reliably.
        daemon: who gets what engines send; None while there is none.
    """

    def __init__(self, scheduler: Scheduler, seen: Counter[str]) -> None:
        self.weather = Weather()
        self.daemon: Receiver | None = None
        self._scheduler = scheduler
        self._seen = seen
        self._connections: dict[bytes, Connection] = {}
        self._opened = 0

    def open(self, process: Process, receive: Callable[[list[bytes]], None]) -> Connection:
        """A new connection, which the daemon calls by a new name."""
        connection = Connection(self._name(), process, receive)
        self._connections[connection.id] = connection
        return connection

    def reconnect(self) -> None:
        """There is another daemon: the connections that are open find it, and it calls them by names of its own."""
        before, self._connections = list(self._connections.values()), {}
        for connection in before:
            connection.id = self._name()
            self._connections[connection.id] = connection

    def close(self, connection: Connection) -> None:
        """Replies find nobody any more. What was sent arrives yet."""
        connection.closed = True
        self._connections.pop(connection.id, None)

    def to_daemon(self, connection: Connection, parts: list[bytes], what: str) -> None:
        """A process sends something."""
        for at_us, keeps_place in self._arrivals(connection.sent_us):
            if keeps_place:
                connection.sent_us = at_us
            self._plan(at_us, f"{connection.process.name} → daemon: {what}", lambda: self._arrive(connection, parts))

    def to_client(self, name: bytes, parts: list[bytes], what: str) -> None:
        """The daemon sends something."""
        connection = self._connections.get(name)
        if connection is None or connection.process.dead:
            self._seen["reply to nobody"] += 1
            return
        for at_us, keeps_place in self._arrivals(connection.answered_us):
            if keeps_place:
                connection.answered_us = at_us
            words = f"daemon → {connection.process.name}: {what}"
            self._plan(at_us, words, lambda: self._arrive_back(connection, parts))

    def _name(self) -> bytes:
        self._opened += 1
        return b"\0" + self._opened.to_bytes(4, "big")

    def _plan(self, at_us: int, what: str, action: Callable[[], None]) -> None:
        self._scheduler.after(at_us - self._scheduler.now_us, what, action)

    def _arrivals(self, last_us: int) -> list[tuple[int, bool]]:
        """When a message arrives, how often, and whether the ones behind it have to wait for it."""
        chance, weather, seen = self._scheduler.chance, self.weather, self._seen
        if chance.happens(weather.drop):
            seen["fault: message lost"] += 1
            return []
        arrivals: list[tuple[int, bool]] = []
        for _ in range(1 + chance.happens(weather.double)):
            late = chance.happens(weather.late)
            overtaken = chance.happens(weather.reorder)
            at_us = self._scheduler.now_us + chance.spread(*(_LATE_US if late else _USUAL_US))
            seen["fault: message late"] += late
            if overtaken:
                seen["fault: message out of order"] += 1
            else:
                at_us = max(at_us, last_us + 1)
            seen["fault: message doubled"] += bool(arrivals)
            arrivals.append((at_us, not overtaken))
        return arrivals

    def _arrive(self, connection: Connection, parts: list[bytes]) -> None:
        daemon = self.daemon
        if daemon is not None:
            daemon.process.do(lambda: daemon.receive(connection, parts))

    def _arrive_back(self, connection: Connection, parts: list[bytes]) -> None:
        def take() -> None:
            if not connection.closed:  # it may have been stopped when this arrived, and gone on since
                connection.receive(parts)

        connection.process.do(take)
