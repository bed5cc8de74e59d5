"""A cluster of three Valkey servers on ports of the loopback interface."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from redis.crc import key_slot

from tests.storage.redis.servers import PATIENCE_S, Server

#: A server gives an order to take over up after five seconds, as on a machine that has no time for it.
_ORDER_S = 5.5
_SLOTS = 16_384
_NODES = 3


class Cluster:
    """Its servers, each of which has a third of the slots."""

    def __init__(self, nodes: list[Server]) -> None:
        self.nodes = nodes
        self.url = f"redis://127.0.0.1:{nodes[0].port}"

    def settings(self, prefix: str, **more: Any) -> dict[str, object]:
        """Settings of a backend of this cluster."""
        return {"url": self.url, "prefix": prefix, **more}

    def owner(self, name: bytes) -> Server:
        """The server that has a key."""
        slot = key_slot(name)
        ranges = self.nodes[0].ask("CLUSTER", "SLOTS")
        port = next(port for first, last, (_, port, *_), *_ in ranges if first <= slot <= last)
        return next(node for node in self.nodes if node.port == port)

    def move(self, name: bytes, to: Server) -> None:
        """Give the slot of a key to another server; the slot is empty."""
        for node in (to, *self.nodes):
            node.ask("CLUSTER", "SETSLOT", key_slot(name), "NODE", to.ask("CLUSTER", "MYID"))


@contextmanager
def replica_of(servers: Cluster, primary: Server) -> Iterator[Server]:
    """A further server, which has all that a primary has."""
    with closing(_node()) as node:
        bus = primary.ask("CONFIG", "GET", "cluster-port")[1]
        node.ask("CLUSTER", "MEET", "127.0.0.1", primary.port, bus.decode())
        name = primary.ask("CLUSTER", "MYID")
        _wait(lambda: name in node.ask("CLUSTER", "NODES"))
        node.ask("CLUSTER", "REPLICATE", name)
        _wait(lambda: node.ask("INFO", "replication").get("master_link_status") == "up")
        yield node


def fail_over(node: Server, others: Sequence[Server], *how: str) -> None:
    """The replica takes the place of its primary, as after an order of an administrator; the others know it."""
    _wait(lambda: b"slave" in node.ask("CLUSTER", "NODES"))
    ordered_s = float("-inf")

    def is_primary() -> bool:
        nonlocal ordered_s
        if node.ask("INFO", "replication")["role"] == "master":
            return True
        if time.monotonic() - ordered_s > _ORDER_S:
            node.ask("CLUSTER", "FAILOVER", *how)
            ordered_s = time.monotonic()
        return False

    _wait(is_primary)
    _wait(lambda: all(node.port in _primaries(other) for other in others))


def _primaries(node: Server) -> set[int]:
    """The ports of the nodes that have slots, as one of them knows."""
    return {port for _, _, (_, port, *_), *_ in node.ask("CLUSTER", "SLOTS")}


def _wait(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.02)


@contextmanager
def cluster() -> Iterator[Cluster]:
    """A cluster that works."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(closing(_node())) for _ in range(_NODES)]
        for number, node in enumerate(nodes):
            first, last = number * _SLOTS // _NODES, (number + 1) * _SLOTS // _NODES - 1
            node.ask("CLUSTER", "ADDSLOTSRANGE", first, last)
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in nodes[1:]:
            bus = node.ask("CONFIG", "GET", "cluster-port")[1]
            nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", node.port, bus.decode())
        _wait(lambda: all(map(_is_whole, nodes)))
        yield Cluster(nodes)


def _is_whole(node: Server) -> bool:
    return len(node.ask("CLUSTER", "SLOTS")) == _NODES and b"cluster_state:ok" in bytes(node.ask("CLUSTER", "INFO"))


def _node() -> Server:
    port, bus = _free_ports()
    options = ["--cluster-enabled", "yes", "--cluster-port", str(bus), "--cluster-require-full-coverage", "no"]
    return Server(*options, port=port)


def _free_ports() -> tuple[int, int]:
    with closing(socket.create_server(("127.0.0.1", 0))) as one, closing(socket.create_server(("127.0.0.1", 0))) as two:
        return one.getsockname()[1], two.getsockname()[1]
