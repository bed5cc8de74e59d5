"""The words for what the core refuses: one sentence with the offending values, one that says what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvcached.core.refusals import Refusal, Why
from kvcached_client.errors import ErrorCode, RequestError, request_error

#: What is wrong, with the values of `Refusal.about`, and what to do.
WORDS: Final[Mapping[Why, tuple[str, str]]] = {
    Why.LEASE_RELEASED: (
        "lease {lease} has been released",
        "release a lease once",
    ),
    Why.COMMIT_OF_OTHER_LENGTH: (
        "{keys} keys and {slots} slots",
        "name one slot per key",
    ),
    Why.DECLARATION_OF_OTHER_LENGTH: (
        "{keys} keys, {slots} slots of them, and a hit of {hit}",
        "name one slot per key, and a hit of at least as many",
    ),
    Why.LOAD_BEHIND_HIT: (
        "blocks {start} to {end} of a hit of {hit}",
        "load one or more blocks of the hit",
    ),
    Why.TOO_MANY_KEYS: (
        "{blocks} keys of {block_size} tokens for a prompt of {tokens} tokens",
        "send the keys of the prompt's full blocks only",
    ),
    Why.WRONG_SHARD: (
        "shard {shard} of {shards} reports that transfer {transfer} is done",
        "count shards from 0",
    ),
    Why.OTHER_KIND: (
        "transfer {transfer} is a {present}, and a {kind} is reported as done",
        "report each copy under its own number and kind",
    ),
    Why.CORRUPT_STORE: (
        "bad blocks of store {transfer}",
        "report bad blocks of loads only; a store that fails has an error",
    ),
    Why.SLOTS_PENDING: (
        (
            "{wanted} slots wanted; of {slots} are {free} free and {evictable} evictable; "
            "{copying} copies under way hold others"
        ),
        "try again when these copies have ended",
    ),
    Why.POOL_ASLEEP: (
        "the device pool of replica {replica!r} is {state}",
        "compute without it; `kvcached wake` makes its memory again",
    ),
    Why.POOL_NOT_ASLEEP: (
        "the device pool of replica {replica!r} is {state}",
        "wake it when it is asleep",
    ),
    Why.CLEARING: (
        "the namespace of replica {replica!r} is being cleared",
        "try again in a moment",
    ),
    Why.FOREIGN_LEASE: (
        "lease {lease} belongs to another session",
        "use your own lease ids",
    ),
    Why.HIT_CLEARED: (
        "the namespace was cleared after lease {lease}",
        "compute the prompt",
    ),
    Why.HIT_CORRUPT: (
        "blocks of the hit of lease {lease} proved bad meanwhile",
        "compute them",
    ),
    Why.FENCES_FULL: (
        "{fences} fences are pending",
        "signal the fences whose work is done",
    ),
    Why.LEASES_FULL: (
        "{leases} leases are held",
        "release what has finished",
    ),
    Why.NAMESPACES_FULL: (
        "{namespaces} namespaces are in use",
        "end the engines of other models, or configure more namespaces",
    ),
    Why.PINS_FULL: (
        "there are {pins} pins",
        "unpin what need not stay",
    ),
    Why.PIN_QUOTA: (
        "{used} blocks of pool {pool!r} are pinned, {more} more are over the quota of {quota}",
        "unpin what need not stay, or configure a larger pin_quota_percent",
    ),
    Why.TRANSFERS_FULL: (
        "{transfers} copies are under way",
        "wait until shards are through with some",
    ),
    Why.NO_SLOTS: (
        "{wanted} slots wanted; of {slots} are {free} free and {evictable} evictable",
        "release leases and try again, or configure more slots",
    ),
    Why.NOT_RESUMABLE: (
        "session {session} cannot be resumed",
        "connect, as a new engine does",
    ),
    Why.NO_SUCH_SESSION: (
        "session {session} is not open",
        "close the client and connect again",
    ),
    Why.COMMIT_OUT_OF_ORDER: (
        "commit starts at block {start}, lease {lease} is at {depth}",
        "commit blocks in the order of the chain, each once",
    ),
    Why.NOT_DECLARING: (
        "session {session} has declared what it holds, or had nothing to declare",
        "declare after a resumed hello, before anything else",
    ),
    Why.SHARD_LEFT: (
        "shard {shard} has left session {session}, and would never make the copy",
        "close shards when no copy is to follow, or let one join as that shard again",
    ),
    Why.STORE_OUT_OF_ORDER: (
        "the store starts at block {start}, lease {lease} is at {reached}",
        "offer blocks in the order of the chain, each once",
    ),
    Why.COPIES_PAUSED: (
        "copies are paused",
        "compute the prompt",
    ),
    Why.DECLARED_ALREADY: (
        "request {request!r} is declared already",
        "declare each lease once",
    ),
    Why.REQUEST_IN_USE: (
        "request {request!r} already holds lease {lease}, acquired for something else or in use",
        "release that lease first, or give every request an id of its own",
    ),
    Why.SESSION_CLEARED: (
        "session {session} is over: the namespace was cleared",
        "stop using its slots, close the client and connect again",
    ),
    Why.SESSION_LOST_MEMBER: (
        "session {session} is over: one of its processes has ended",
        "stop using its slots, end its other processes, close the client and connect again",
    ),
    Why.SESSION_SILENT: (
        "session {session} sent no heartbeat for {ttl_ms} ms",
        "stop using its slots, end its processes, close the client and connect again",
    ),
    Why.STALE_EPOCH: (
        "epoch {epoch} of pool {pool!r} is over, it is {present} now",
        "close the client and connect again",
    ),
    Why.STILL_LOADING: (
        "part of the hit of lease {lease} is still loading, and what was computed on it may be wrong",
        "wait for the loads first: send load",
    ),
    Why.NO_SUCH_LEASE: (
        "there has been no lease {lease}",
        "use the id from acquire",
    ),
    Why.COMMIT_OF_FOREIGN_SLOTS: (
        "the commit names slots that lease {lease} does not hold for writing",
        "name slots from acquire or allocate, each once, that no commit has named",
    ),
    Why.SLOTS_NOT_SET_ASIDE: (
        "request {request!r} declares slots that are not set aside for session {session}",
        "declare each slot of the pool for one lease, or as the same block of the same chain",
    ),
    Why.BLOCK_TOO_LARGE: (
        "a slab of the host pool holds none of these blocks",
        "configure larger slabs",
    ),
    Why.OTHER_SHAPE: (
        "namespace {label!r} has blocks of another shape",
        "let what a namespace is made from tell its layout, too",
    ),
}


#: What a verb raises instead of an answer: the service's own errors, and refusals of the core.
REFUSED = (RequestError, Refusal)


def in_words(refusal: RequestError | Refusal) -> RequestError:
    """The error that a peer gets; those of the service have their words already."""
    if isinstance(refusal, RequestError):
        return refusal
    message, fix = WORDS[refusal.why]
    return request_error(refusal.code, message.format_map(refusal.about), fix)


def internal_error() -> RequestError:
    """What a peer is told of a bug of ours."""
    return request_error(ErrorCode.INTERNAL, "the daemon failed while serving this request", "see the daemon's log")
