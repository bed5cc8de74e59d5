"""Listeners of vLLM's cache events learn what the host pool holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from tests.vllm.conftest import Prompts
from tests.vllm.fleet import Fleet
from tests.vllm.server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

LISTEN_TIMEOUT_MS = 30_000
#: A publisher learns of a subscription at some time, without an event for that.
HEAR_TIMEOUT_MS = 200


class Listener:
    """Subscribes to a server's cache events; keeps those of the host pool."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.events: list[dict[str, Any]] = []

    def until(self, reached: Callable[[], bool]) -> None:
        """Listen until the events are as wanted."""
        while not reached():
            assert self._socket.poll(LISTEN_TIMEOUT_MS), f"only {self.events}"
            _, _, payload = self._socket.recv_multipart()
            batch: list[Any] = msgspec.msgpack.decode(payload)
            self.events += [each for each in batch[1] if each.get("medium") == "CPU"]

    def of(self, kind: str, field: str) -> list[Any]:
        """What all events of a kind have in a field, together."""
        return [item for event in self.events if event["type"] == kind for item in event[field]]


@pytest.fixture
def listener(server: VllmServer, fleet: Fleet, prompt: Prompts) -> Iterator[Listener]:
    """A listener whose subscription has arrived: it hears of prompts that are stored."""
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.SUB) as socket:
        socket.linger = 0
        socket.subscribe(b"")
        socket.connect(fleet.events_of("a"))
        attempts = 0
        while not socket.poll(HEAR_TIMEOUT_MS):
            attempts += 1
            server.complete(prompt(2, f"attempt {attempts}"))
        yield Listener(socket)


def test_listeners_learn_what_is_stored_and_cleared(server: VllmServer, listener: Listener, prompt: Prompts) -> None:
    """Stored blocks are told with their tokens, as those of the device are; after a reset they are told as removed."""
    tokens = prompt(4)
    server.complete(tokens)
    listener.until(lambda: listener.of("BlockStored", "token_ids")[-len(tokens) :] == tokens)
    stored = listener.of("BlockStored", "block_hashes")[-4:]

    server.forget(external=True)
    server.complete(prompt(1, "a step"))  # vLLM publishes with a step
    listener.until(lambda: set(stored) <= set(listener.of("BlockRemoved", "block_hashes")))
