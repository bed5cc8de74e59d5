"""What `kvcached explain` says to people: how far a prompt is cached, what the next block lacks, what to look at."""

from __future__ import annotations

from typing import Final

from kvcached.explain import Verdict
from kvcached_client.types import MissReason

#: Of the block behind the hit: what became of it, and what to look at.
_MEANINGS: Final = {
    MissReason.HIT: ("", ""),
    MissReason.LAST_TOKEN: (
        "is cached, but holds the prompt's last token",
        "nothing: one token has to be computed, or there would be no output",
    ),
    MissReason.NEVER_STORED: ("was never stored, or so long ago that it is forgotten", ""),
    MissReason.EVICTED: (
        "was cached, and was evicted: others needed its slot",
        "evicted_blocks and host_evicted_blocks in `kvcached stats`; configure more slots or a larger host pool",
    ),
    MissReason.CORRUPT_OR_FAILED: (
        "was dropped: its copy failed or proved to be damaged, or its engine ended before it was complete",
        "the daemon's log, and store_failed_blocks, load_failed_blocks and corrupt_blocks in `kvcached stats`",
    ),
    MissReason.NO_ROOM: (
        "was not stored: every host slot was in use when it was computed",
        "store_refused_blocks in `kvcached stats`; configure a larger host pool, or run fewer requests at once",
    ),
    MissReason.WORKER_LOST: (
        "was lost with the memory of a worker that died",
        "the daemon's log, which says how the worker ended",
    ),
    MissReason.CLEARED: (
        "was stored before the namespace was cleared",
        "who cleared it: an engine does when its weights change or its prefix cache is reset",
    ),
    MissReason.FILLING: ("is being stored right now", "the same request again, in a moment"),
    MissReason.BELOW_THRESHOLD: (
        "is in host memory, but so few blocks are computed rather than loaded",
        "load_threshold of the replica in the configuration",
    ),
    MissReason.OVER_QUOTA: (
        "is in host memory, but as many blocks are being loaded as may be",
        "load_quota of the replica in the configuration",
    ),
    MissReason.PAUSED: (
        "is in host memory, but copies of the replica are paused",
        "who has paused them: `kvcached resume` ends that",
    ),
    MissReason.OTHER_REPLICA: (
        "is in the device pool of another replica only",
        "the [host] table of the configuration: replicas share blocks through host memory",
    ),
    MissReason.UNKNOWN_NAMESPACE: (
        "no engine has declared such a namespace since the daemon started",
        "the engine's log: whether it found the daemon. `kvcached stats` names the namespaces",
    ),
}


def lines_of(verdict: Verdict) -> list[str]:
    """A verdict in a few lines, the first of which says where and how much."""
    explanation = verdict.explanation
    meaning, _ = _MEANINGS[explanation.reason]
    if explanation.reason is MissReason.UNKNOWN_NAMESPACE:
        begin = f" that begins with {explanation.namespace}" if explanation.namespace else ""
        return [f"no namespace{begin}: {meaning}", f"  look at: {advice(verdict)}"]
    lines = [f"{_place(verdict)}: {_extent(verdict)}"]
    if meaning:
        lines.append(f"  block {explanation.hit}{_tokens(verdict)}, key {explanation.key.hex()}, {meaning}")
    if told := advice(verdict):
        lines.append(f"  look at: {told}")
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
        goes = "1 prompt goes" if explanation.others == 1 else f"{explanation.others} prompts go"
        return (
            f"the text from token {first} on: {goes} on otherwise there. Dates, names, chat templates, and the order "
            "of tools or documents often differ"
        )
    if explanation.hit:
        return "nothing: no request has come further with these tokens"
    return "whether this is the engine's namespace, and whether it stores: committed_blocks, stored_blocks in the stats"


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
