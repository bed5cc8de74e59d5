"""Which workload passes which failpoint, and at which pass something is to happen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pytest

from tests.faults.harness import ACTIONS


class Case(NamedTuple):
    """A failpoint in the workload of `engine.py`.

    Attributes:
        kind: of the engine.
        at: which pass.
        quick: actions that the default run has, too; all of them are slow tests.
    """

    failpoint: str
    kind: str
    at: int = 1
    quick: tuple[str, ...] = ()


#: In an engine's process.
ENGINE_CASES = (
    Case("client.acquired", "managed"),
    Case("client.commit", "managed"),
    Case("client.sent", "managed", quick=("kill",)),
    Case("client.sent", "managed", 2),
    Case("client.load", "managed"),
    Case("client.heartbeat", "managed"),
    Case("client.heartbeat", "offload"),
    Case("offload.store.prepared", "offload"),
    Case("blocks.store.cleared", "offload"),
    Case("blocks.copy", "offload", 2, quick=("stop",)),
    Case("blocks.store.copied", "offload"),
    Case("blocks.store.header", "offload", 2),
    Case("offload.store.written", "offload"),
    Case("offload.load.prepared", "offload"),
    Case("blocks.copy", "offload", 6),
    Case("offload.load.copied", "offload"),
)
#: In a worker of the daemon. Commands are those of one store and one load, both of two layers and four blocks.
WORKER_CASES = (
    Case("worker.store.begin", "managed"),
    Case("blocks.store.cleared", "managed"),
    Case("blocks.copy", "managed", quick=("kill",)),
    Case("blocks.store.copied", "managed"),
    Case("blocks.store.header", "managed", 2),
    Case("worker.store.written", "managed"),
    Case("worker.ack", "managed"),
    Case("worker.load.begin", "managed"),
    Case("blocks.copy", "managed", 3),
    Case("worker.load.copied", "managed"),
    Case("worker.ack", "managed", 2),
)
#: In the daemon. The third request of an engine is its commit, or in offload mode `prepare_store`; the fifth is
#: `transfer_done`. A second attach request is that of the shard.
DAEMON_CASES = (
    Case("daemon.attach", "managed", 2),
    Case("daemon.attach", "offload", 2),
    Case("daemon.request", "managed", 3, quick=("raise",)),
    Case("daemon.request", "offload", 3),
    Case("daemon.reply", "managed", 3),
    Case("daemon.reply", "offload", 3),
    Case("daemon.reply", "offload", 5),
    Case("daemon.order", "managed"),
    Case("daemon.order", "managed", 2),
    Case("daemon.ledger.write", "offload", 2),
    Case("daemon.ledger.written", "offload", 2),
)
#: In a supervised daemon, which is killed behind what one engine has stored in peace: six requests, two attach
#: requests, five ledgers. The others are `acquire`, `prepare_store`, `transfer_done`, `prepare_load` of the next one.
SUPERVISED_CASES = (
    Case("daemon.attach", "offload", 4),
    *(Case("daemon.request", "offload", at) for at in (8, 9, 11, 14)),
    Case("daemon.reply", "offload", 8),
    Case("daemon.reply", "offload", 9, quick=("kill",)),
    *(Case("daemon.reply", "offload", at) for at in (11, 14)),
    Case("daemon.ledger.write", "offload", 7),
    Case("daemon.ledger.written", "offload", 7),
    Case("daemon.reply", "managed", 9),
    Case("daemon.order", "managed", 1),
    Case("daemon.order", "managed", 2),
)
#: In a supervised daemon that somebody asks to clear a replica, or for other weights.
RENEWAL_CASES = (Case("daemon.renewed", "managed"),)
#: In a supervised daemon that somebody asks to let a pool sleep, and to wake it.
SLEEP_CASES = (
    Case("daemon.emptied", "managed"),
    Case("daemon.asleep", "managed"),
    Case("daemon.made", "managed"),
)


def parameters(cases: Iterable[Case], actions: Sequence[str] = ACTIONS) -> list[Any]:
    """Every case with every action; those that are not quick are slow tests."""
    return [
        pytest.param(
            case,
            action,
            f"{number}{action[0]}",
            id=f"{case.failpoint}@{case.at}-{case.kind}-{action}",
            marks=[] if action in case.quick else [pytest.mark.slow],
        )
        for number, case in enumerate(cases)
        for action in actions
    ]
