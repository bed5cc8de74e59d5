"""What `kvcached explain` says to people: how far a prompt is cached, what the next block lacks, what to look at."""

from __future__ import annotations

from typing import Final

from kvcached.cli.name_search import Verdict
from kvcached_client.types import MissReason

#: Of the block behind the hit: what became of it, and what to look at.
_MEANINGS: Final = {
    MissReason.HIT: ("", ""),
    MissReason.LAST_TOKEN: (
        "is cached, but holds the prompt's last token",
        "nothing to do: at least one token must be computed to get an output",
    ),
    MissReason.NEVER_STORED: ("was never stored, or was evicted too long ago to be remembered", ""),
    MissReason.EVICTED: (
        "was cached, and was evicted because another block needed its slot",
        "check evicted_blocks and host_evicted_blocks in `kvcached stats`; configure more slots or a larger host pool",
    ),
    MissReason.CORRUPT_OR_FAILED: (
        "was dropped: its copy failed or was damaged, or its engine ended before the copy was complete",
        "check the daemon's log, and store_failed_blocks, load_failed_blocks and corrupt_blocks in `kvcached stats`",
    ),
    MissReason.NO_ROOM: (
        "was not stored: every host slot was in use when it was computed",
        "check store_refused_blocks in `kvcached stats`; configure a larger host pool, or run fewer requests at once",
    ),
    MissReason.WORKER_LOST: (
        "is in host memory, and a worker that would load it has died; another one is being started",
        "the daemon's log, which says how the worker ended",
    ),
    MissReason.CLEARED: (
        "was stored before the namespace was cleared",
        "find out what cleared it: an engine clears when its weights change or its prefix cache is reset",
    ),
    MissReason.FILLING: ("is being stored right now", "send the same request again in a moment"),
    MissReason.BELOW_THRESHOLD: (
        "is in host memory, but a hit of so few blocks is computed instead of loaded",
        "check load_threshold of the replica in the configuration",
    ),
    MissReason.OVER_QUOTA: (
        "is in host memory, but the limit of blocks being loaded is reached",
        "check load_quota of the replica in the configuration",
    ),
    MissReason.PAUSED: (
        "is in host memory, but copies of the replica are paused",
        "end the pause with `kvcached resume`",
    ),
    MissReason.OTHER_REPLICA: (
        "is only in the device pool of another replica",
        "check the [host] table of the configuration: replicas share blocks through host memory",
    ),
    MissReason.UNKNOWN_NAMESPACE: (
        "no engine has declared such a namespace since the daemon started",
        "check the engine's log: did the engine find the daemon? `kvcached stats` lists the namespaces",
    ),
}


def lines_of(verdict: Verdict) -> list[str]:
    """A verdict in a few lines, the first of which says where and how much."""
    explanation = verdict.explanation
    meaning, _ = _MEANINGS[explanation.reason]
    if explanation.reason is MissReason.UNKNOWN_NAMESPACE:
        begin = f" that begins with {explanation.namespace}" if explanation.namespace else ""
        return [f"no namespace{begin}: {meaning}", f"  advice: {advice(verdict)}"]
    lines = [f"{_place(verdict)}: {_extent(verdict)}"]
    if meaning:
        lines.append(f"  block {explanation.hit}{_tokens(verdict)}, key {explanation.key.hex()}, {meaning}")
    if told := advice(verdict):
        lines.append(f"  advice: {told}")
    lines.extend(
        f"  the same tokens {each.what} would hit {each.hit} blocks: {each.differs}" for each in verdict.variants
    )
    return lines


def advice(verdict: Verdict) -> str:
    """What to look at; "" where there is nothing to do."""
    explanation = verdict.explanation
    if verdict.hint or explanation.reason is not MissReason.NEVER_STORED:
        return verdict.hint or _MEANINGS[explanation.reason][1]
    if explanation.others:
        first = explanation.hit * explanation.block_size
        others = "1 cached prompt differs" if explanation.others == 1 else f"{explanation.others} cached prompts differ"
        return (
            f"check the text from token {first} on: {others} there. Dates, names, chat templates, and the order "
            "of tools or documents often differ"
        )
    if explanation.hit:
        return "nothing to do: no earlier request had more of these tokens"
    return (
        "check whether this is the engine's namespace, and whether the engine stores blocks: committed_blocks and "
        "stored_blocks in `kvcached stats`"
    )


def _place(verdict: Verdict) -> str:
    explanation = verdict.explanation
    name = f"replica {explanation.replica}" if explanation.replica else explanation.label
    return f"{name}, namespace {explanation.namespace}"


def _extent(verdict: Verdict) -> str:
    explanation = verdict.explanation
    tokens = (
        "" if verdict.tokens is None else f", {explanation.hit * explanation.block_size} of {verdict.tokens} tokens"
    )
    places = {"device": explanation.device, "host memory": explanation.host}
    held = " and ".join(f"{blocks} in {place}" for place, blocks in places.items() if blocks)
    return f"{explanation.hit} of {verdict.blocks} blocks are a hit{tokens}{f' ({held})' if held else ''}"


def _tokens(verdict: Verdict) -> str:
    if verdict.tokens is None:
        return ""
    size = verdict.explanation.block_size
    first = verdict.explanation.hit * size
    return f" (tokens {first} to {first + size - 1})"
