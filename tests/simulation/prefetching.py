"""Engines that have a prompt's blocks brought from storage before they ask for a lease."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcached_client.errors import Stale, TransportError
from kvcached_client.protocol import engine as wire
from kvcached_client.protocol.sessions import StopPolicy
from tests.simulation.line import PATIENCE_US
from tests.simulation.scheduler import MS, Broken

if TYPE_CHECKING:
    from tests.simulation.engine import EngineSession
    from tests.simulation.process import Process
    from tests.simulation.world import World

_HAPPENS = 0.4
_STOPS: tuple[StopPolicy, ...] = ("best_effort", "wait_complete", "wait_complete", "timeout")
_DEADLINES_MS = (5, 60, 400, 2000)
#: Tokens per second; the last one computes sooner than storage brings anything.
_RATES = (0.0, 0.0, 100.0, 1e6)


async def prefetch(
    world: World, process: Process, session: EngineSession, keys: bytes, tokens: int, *, full: bool
) -> None:
    """At times, and mostly waiting for what comes of it.

    Raises:
        Stale: the session is over.
    """
    chance = world.chance
    if not keys or not chance.happens(_HAPPENS):
        return
    deadline_ms = chance.among(_DEADLINES_MS)
    request = wire.Prefetch(
        id=session.line.next_id(),
        epoch=session.epoch,
        tokens=tokens,
        full=full,
        stop=chance.among(_STOPS),
        deadline_ms=deadline_ms,
        prefill_tokens_per_s=chance.among(_RATES),
    )
    if chance.happens(0.15):  # nobody looks at what comes of it: the request does not wait, or its engine goes first
        process.start(_forgotten(world, session, request, keys))
        return
    await _asked(world, session, request, keys, patience_us=PATIENCE_US + deadline_ms * MS)


async def wait_for_stores(world: World, session: EngineSession, keys: bytes, tokens: int) -> None:
    """Until others have stored blocks of a prompt, or for some time.

    Raises:
        Stale: the session is over.
    """
    deadline_ms = world.chance.among(_DEADLINES_MS[1:])
    request = wire.Prefetch(
        id=session.line.next_id(),
        epoch=session.epoch,
        tokens=tokens,
        full=True,
        stop=world.chance.among(_STOPS[1:]),
        deadline_ms=deadline_ms,
        prefill_tokens_per_s=world.chance.among(_RATES),
    )
    await _asked(world, session, request, keys, patience_us=PATIENCE_US + deadline_ms * MS)


async def _forgotten(world: World, session: EngineSession, request: wire.Prefetch, keys: bytes) -> None:
    try:
        await _asked(world, session, request, keys, patience_us=PATIENCE_US)
    except Stale:
        world.seen["prefetch of a session that was over"] += 1


async def _asked(
    world: World, session: EngineSession, request: wire.Prefetch, keys: bytes, *, patience_us: int
) -> None:
    try:
        told, _ = await session.line.ask(
            request, wire.Prefetched, (keys,), tries=world.chance.number(1, 2), patience_us=patience_us
        )
    except TransportError:
        world.seen["prefetch without an answer"] += 1
        return
    blocks = len(keys) // 16
    if told.fetched > told.blocks or told.blocks > blocks or told.is_over == (told.reason == "waiting"):
        raise Broken(f"a prefetch of {blocks} blocks is answered by {told}")
    world.seen[f"prefetch: {told.reason}"] += 1
