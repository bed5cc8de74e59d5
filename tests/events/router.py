"""A router as `docs/events.md` describes it, with libzmq: exact after a late start, missed batches and restarts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)
#: namespace, rank (None: host memory)
Tier = tuple[str, int | None]


class Index:
    """The blocks of each tier, from batches in the order of their numbers, and what was told of their tokens."""

    def __init__(self) -> None:
        self.blocks: dict[Tier, set[bytes]] = {}
        self.tokens: dict[tuple[Tier, bytes], list[int]] = {}

    def apply(self, payload: bytes) -> None:
        """Take in a batch."""
        batch: list[Any] = msgspec.msgpack.decode(payload)
        _, events, rank = batch
        for event in events:
            held = self.blocks.setdefault((event["namespace"], rank), set())
            if event["type"] == "BlockStored":
                assert event["medium"] == ("CPU" if rank is None else "GPU")
                held.update(event["block_hashes"])
                self._note_tokens((event["namespace"], rank), event)
            elif event["type"] == "BlockRemoved":
                held.difference_update(event["block_hashes"])
            else:
                held.clear()

    def _note_tokens(self, tier: Tier, event: dict[str, Any]) -> None:
        size, keys, tokens = event["block_size"], event["block_hashes"], event["token_ids"]
        assert len(tokens) in {0, size * len(keys)}
        for at, key in enumerate(keys):
            self.tokens[tier, key] = tokens[at * size : (at + 1) * size]

    def solid(self) -> dict[Tier, set[bytes]]:
        """The tiers that have blocks."""
        return {tier: held for tier, held in self.blocks.items() if held}


class Router(Index):
    """Follows a daemon.

    Attributes:
        last: number of the last batch that the index has.
        seen: what has happened.
    """

    def __init__(self, events: str, replay: str, *, timeout_ms: int = 20_000) -> None:
        super().__init__()
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._events = self._context.socket(zmq.SUB)
        self._events.setsockopt(zmq.RECONNECT_IVL, 20)
        self._events.subscribe(b"")
        self._events.connect(events)
        self._replay_endpoint = replay
        self._timeout_ms = timeout_ms
        self.last = -1
        self.seen: Counter[str] = Counter()

    @classmethod
    def of(cls, run_dir: Path) -> Router:
        """Of the daemon in a run directory."""
        return cls(f"ipc://{run_dir / 'events.sock'}", f"ipc://{run_dir / 'replay.sock'}")

    def close(self) -> None:
        """End it."""
        self._context.destroy(linger=0)

    def take(self, timeout_ms: int) -> bool:
        """Take in the next batch; False where none comes in time."""
        if not self._events.poll(timeout_ms):
            return False
        _, number, payload = self._events.recv_multipart()
        self.received(int.from_bytes(number, "big"), payload)
        return True

    def received(self, number: int, payload: bytes) -> None:
        """A batch has come."""
        if number == self.last + 1:
            self.apply(payload)
            self.last = number
        elif number > self.last:
            self.seen["gaps"] += 1
            self.catch_up()

    def catch_up(self) -> None:
        """Get what is missing: batches that are kept, or else a snapshot, and the batches behind it."""
        while not self._replay():
            self.seen["snapshots"] += 1
            answers = self._ask(b"snapshot/1")
            if not answers:
                continue
            self.blocks.clear()
            self.last = int.from_bytes(answers[0][1], "big")
            for _, _, payload in answers[1:]:
                self.apply(payload)

    def _replay(self) -> bool:
        """Take in the batches behind the last one; False where they are not kept."""
        if self.last < 0:
            return False
        answers = self._ask((self.last + 1).to_bytes(8, "big"))
        if answers is None:
            return False
        for _, number, payload in answers:
            if int.from_bytes(number, "big") != self.last + 1:
                return False
            self.apply(payload)
            self.last += 1
        return True

    def _ask(self, request: bytes) -> list[list[bytes]] | None:
        """The messages before the end of an answer; None where the daemon dies meanwhile."""
        with self._context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(self._replay_endpoint)
            socket.send_multipart([b"", request])
            answers: list[list[bytes]] = []
            while socket.poll(self._timeout_ms):
                _, *message = socket.recv_multipart()
                if message[1] == END:
                    return answers
                answers.append(message)
        return None
